"""Checkpoints whose files hold weights that bitsandbytes or torchao has quantised, as transformers writes them.

Beside a weight's bytes a file of bitsandbytes has its scales, and of four bits the values that these stand for and a
text in JSON with the rest, as bytes (``QuantState.as_dict`` of bitsandbytes). A file of torchao has the tensors that a
weight consists of, and among its metadata, by the weight's name, a text in JSON with the class and the rest
(``torchao.prototype.safetensors``).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stronghold.formats.tensor_files import DTYPES
from stronghold.formats.weight_files import Entry, WeightFiles

_STATE = ".quant_state.bitsandbytes__"
_ROW_MAJOR = 0
"""The only layout of eight bits, by bitsandbytes' number, in which a checkpoint still holds them."""
_NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}
"""What PyTorch calls the types of the format."""


@dataclass(frozen=True)
class KeptWeight:
    """How a weight is kept: ``kind`` is "nf4", "fp4" or "int8" of bitsandbytes, or a class of torchao's.

    ``state`` is what the file says of it, of eight bits nothing; ``parts`` the names here of the tensors that one of
    torchao's consists of, by their own.
    """

    kind: str
    state: dict[str, Any]
    codes: tuple[Tensor, ...] = ()
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def nested(self) -> bool:
        return "nested_offset" in self.state


class QuantisedFiles(WeightFiles):
    """The tensors in such a folder, by the names that they have where they move: ``X.weight.nf4.absmax``, say.

    ``kept`` are the weights that are quantised, by name; other tensors are as they are. Raises ValueError for a weight
    of which a part is missing, or of another layout.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        self.kept: dict[str, KeptWeight] = {}
        self._own: dict[str, str] = {}
        """What tensors are called in the files, where it is otherwise."""
        self._offsets: dict[str, float] = {}
        for name in [*self.entries]:
            if _STATE in name:
                self._find_four_bits(name)
            elif name.endswith(".SCB"):
                self._find_eight_bits(name)
        for name, text in sorted(self.notes.items()):
            if '"_tensor_data_names"' in text:
                self._find_subclass(name, text)

    def is_floating(self, name: str) -> bool:
        return name in self._own or super().is_floating(name)  # what a weight consists of is as its library has it

    def is_kept(self, name: str) -> bool:
        return name in self.kept

    def read(self, name: str) -> Tensor:
        if name in self._offsets:
            return torch.tensor(self._offsets[name], dtype=torch.float32, device="cpu")
        own = self._own.get(name, name)
        return self._read(own, self.entries[name])

    def _find_four_bits(self, name: str) -> None:
        weight, _, kind = name.partition(_STATE)
        entry = self.entries[name]
        try:
            state = json.loads(bytes(self._take(name).tolist()))
            int(state["blocksize"]), str(state["dtype"]), list(state["shape"])
            offset = float(state["nested_offset"]) if "nested_offset" in state else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"what bitsandbytes says of a weight in four bits must be JSON with its shape (at {str(entry.file)!r}, "
                f"{name}: {error!r}); download or save it again"
            ) from error
        codes = [self._take(f"{weight}.quant_map")]
        self._rename(f"{weight}.absmax", f"{weight}.{kind}.absmax")
        if offset is not None:
            codes.append(self._take(f"{weight}.nested_quant_map"))
            self._rename(f"{weight}.nested_absmax", f"{weight}.{kind}.nested_absmax")
            self._offsets[f"{weight}.{kind}.nested_offset"] = offset
            self.entries[f"{weight}.{kind}.nested_offset"] = Entry(entry.file, "F32", ())
        self.kept[weight] = KeptWeight(kind, state, tuple(codes))

    def _find_eight_bits(self, name: str) -> None:
        module = name.removesuffix(".SCB")
        layout = f"{module}.weight_format"
        if layout in self.entries and (found := int(self._take(layout))) != _ROW_MAJOR:
            raise ValueError(
                f"weights in eight bits must be kept row by row (at {str(self.directory)!r}, {layout}: {found}); save "
                "the model again with a recent bitsandbytes"
            )
        self._rename(name, f"{module}.weight.int8.SCB")
        self.kept[f"{module}.weight"] = KeptWeight("int8", {})

    def _find_subclass(self, name: str, text: str) -> None:
        module, _, own = name.rpartition(".")
        try:
            state = json.loads(text)
            kind, names = str(state["_type"]), [str(part) for part in state["_tensor_data_names"]]
            dict(state["_data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"what torchao says of a weight must be JSON with its class (in {str(self.directory)!r}, {name}: "
                f"{error!r}); download or save it again"
            ) from error
        parts = {}
        for part in names:
            there = f"{module}._{own}_{part}"
            self._need(there)
            dtype = self.entries[there].dtype
            parts[part] = f"{name}.{kind}.{part}.{_NAMES.get(dtype, dtype)}"
            self._rename(there, parts[part])
        self.kept[name] = KeptWeight(kind, state, parts=parts)

    def _take(self, name: str) -> Tensor:
        """Returns a tensor that is no part of the model from here on."""
        self._need(name)
        return self._read(name, self.entries.pop(name)).clone()  # a part of the mapped file until then

    def _rename(self, name: str, other: str) -> None:
        self._need(name)
        self.entries[other] = self.entries.pop(name)
        self._own[other] = name

    def _need(self, name: str) -> None:
        if name not in self.entries:
            raise ValueError(
                f"a checkpoint must hold all parts of a quantised weight (in {str(self.directory)!r} missing {name}); "
                "download or save it again"
            )
