"""Reads what ``torch.distributed.checkpoint`` wrote, tensor by tensor.

Nothing in it has a checksum, and its ``.metadata`` is a pickle: read one only from a source that you trust.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from stronghold.errors import CheckpointError
from stronghold.formats.manifest import BufferEntry, Manifest, ParameterEntry, manifest_from, name_of
from stronghold.formats.moments import ADAMW, MUON, NAMES, wrong_moment

T = TypeVar("T")

MODEL, OPTIMIZER = "model", "optimizer"
"""What :func:`stronghold.checkpoint.save` writes weights and optimizer under."""
OWN, RECORD, BUFFERS = "stronghold", "manifest", "buffers"
"""What it writes the rest under: the manifest as JSON, and the buffers that no ``state_dict()`` has."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_KINDS = ("amsgrad", "maximize", "decoupled_weight_decay")
"""What tells AdamW from other optimizers of its family, where it is kept."""
_MUON_SETTINGS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_OF_MUON = "ns_steps"
"""What a group of torch.optim.Muon has and no other's, of which SGD has a momentum_buffer as well."""


class DistributedCheckpoint:
    """One in ``directory``, of the model with parameters called ``names``, in the optimizer's ``groups`` of them.

    Weights are looked for under one prefix and moments under another, whatever these are; ``buffers`` are those that a
    ``state_dict()`` has. ``manifest`` tells of no files. Raises CheckpointError where it cannot be read or is not of
    that model.
    """

    def __init__(
        self, directory: Path, names: Iterable[str], buffers: Iterable[str], groups: Sequence[Sequence[str]]
    ) -> None:
        self._directory, self._names = directory, list(names)
        self._reader = _Reader(directory)
        self._entries = self._told(lambda: dict(self._reader.read_metadata().state_dict_metadata))
        self._model = self._told(self._model_prefix)
        self._states = self._told(self._states_prefix)
        own = f"{OWN}.{RECORD}" in self._entries
        self.manifest = self._recorded() if own else self._told(lambda: self._found(buffers, groups))
        of_groups = zip(self.manifest.optimizer["groups"], self.manifest.optimizer["group_names"], strict=True)
        self._by_muon = {name for group, its in of_groups if group.get("use_muon") is True for name in its}
        self._told(self._check)

    def unit(self, names: Iterable[str]) -> DistributedTensors:
        """Returns the tensors of the parameters called ``names``, by the names that our own files have for them."""
        keys = {name: self._model + name for name in names}
        keys |= {f"{name}/{moment}": f"{self._states}{name}.{moment}" for name in names for moment in NAMES}
        return DistributedTensors(self, {name: key for name, key in keys.items() if key in self._entries})

    def buffers(self) -> DistributedTensors:
        known = self.manifest.buffers.items()
        return DistributedTensors(self, {name: self._prefix(entry) + name for name, entry in known})

    def _prefix(self, buffer: BufferEntry) -> str:
        return self._model if buffer.persistent else f"{OWN}.{BUFFERS}."

    def check_moments(self, first: int, every: int) -> None:
        """Reads the moments of each ``every``-th parameter, one after the other; refuses what no update can have left.

        Raises CheckpointError, naming the parameter.
        """
        trained = [name for name, entry in self.manifest.parameters.items() if entry.step is not None]
        for name in trained[first::every]:
            for moment in self._moments_of(name):
                if rule := wrong_moment(self.read(f"{self._states}{name}.{moment}"), moment):
                    raise CheckpointError(
                        f"{moment} of {name} {rule}, in {self._directory}, and {self._optimizer_of(name)} would make "
                        "weights of it; load another checkpoint"
                    )

    def _moments_of(self, name: str) -> tuple[str, ...]:
        return (MUON,) if name in self._by_muon else ADAMW

    def _optimizer_of(self, name: str) -> str:
        return "Muon" if name in self._by_muon else "AdamW"

    def entry(self, key: str) -> TensorStorageMetadata:
        return self._entries[key]  # type: ignore[return-value]

    def read(self, key: str, target: Tensor | None = None) -> Any:
        """Returns what is called ``key``: a tensor in ``target``, if that is given, in the dtype it has."""
        return self._read({key: target})[key]

    def _read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Returns what has these names, tensors in those that are given."""
        state: dict[str, Any] = {}
        for key, target in wanted.items():
            entry = self._entries.get(key)
            if entry is None:
                self._refuse(f"must have all that belongs to AdamW's state (it has no {key})")
            if target is None and isinstance(entry, TensorStorageMetadata):
                target = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="cpu")
            state[key] = target
        self._told(lambda: self._load(state))
        return state

    def _load(self, state: dict[str, Any]) -> None:
        self._reader.wanted = tuple(state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each process reads for itself
            dcp.load(state, storage_reader=self._reader, planner=_LoadPlanner(), no_dist=True)

    def _refuse(self, rule: str) -> NoReturn:
        raise CheckpointError(
            f"a checkpoint of torch.distributed.checkpoint {rule}, in {self._directory}; build the model and optimizer "
            "that were saved, and save get_model_state_dict() and get_optimizer_state_dict() of "
            "torch.distributed.checkpoint.state_dict"
        )

    def _told(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except CheckpointError:
            raise
        except (Exception, dcp.CheckpointException) as error:  # a pickle raises anything
            cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
            if not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
            raise CheckpointError(
                f"{self._directory} could not be read as a checkpoint of torch.distributed.checkpoint "
                f"({type(cause).__name__}: {cause}); pass another one"
            ) from cause

    def _model_prefix(self) -> str:
        """Returns what stands before the names of all parameters."""
        first = self._names[0]
        found = {key.removesuffix(first) for key in self._entries if key == first or key.endswith(f".{first}")}
        absent = {
            prefix: [key for name in self._names if (key := prefix + name) not in self._entries]
            for prefix in found or {f"{MODEL}."}
        }
        whole = [prefix for prefix in sorted(absent) if not absent[prefix]]
        if len(whole) == 1 or f"{MODEL}." in whole:
            return f"{MODEL}." if f"{MODEL}." in whole else whole[0]
        got = f"they are under {' and '.join(map(repr, whole))}" if whole else f"no {min(absent.values(), key=len)[0]}"
        self._refuse(f"must have all of the model's parameters once, or under {MODEL!r} (got {got})")

    def _states_prefix(self) -> str:
        """Returns what stands before the names of the parameters that have moments."""
        names, found = set(self._names), Counter[str]()
        for key in self._entries:
            state, _, last = key.rpartition(".")
            if last in (ADAMW[0], MUON):
                found.update(state.removesuffix(tail) for tail in _tails(state) if tail in names)
        usual = f"{OPTIMIZER}.state."
        return usual if usual in found or not found else found.most_common(1)[0][0]

    def _check(self) -> None:
        """Refuses what could not be loaded to the end."""
        for name, parameter in self.manifest.parameters.items():
            keys = [self._model + name]
            if parameter.step is not None:
                keys += [f"{self._states}{name}.{moment}" for moment in self._moments_of(name)]
            for key in keys:
                entry = self._entries.get(key)
                if not isinstance(entry, TensorStorageMetadata):
                    self._refuse(f"must have weights and moments of {self._optimizer_of(name)} (got no tensor {key})")
                if list(entry.size) != parameter.shape:
                    self._refuse(f"must have moments like their weights (got {key} of shape {list(entry.size)})")
                if entry.properties.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                    self._refuse(f"must be in fp32, bf16 or fp16 (got {entry.properties.dtype} for {key})")
        for name, buffer in self.manifest.buffers.items():
            key = self._prefix(buffer) + name
            entry = self._entries.get(key)
            like = [buffer.dtype, *buffer.shape]
            if not isinstance(entry, TensorStorageMetadata) or [name_of(entry.properties.dtype), *entry.size] != like:
                self._refuse(f"must have the buffers that it tells of (got no tensor {key} of {like})")

    def _recorded(self) -> Manifest:
        record = self.read(f"{OWN}.{RECORD}")
        return self._told(lambda: manifest_from(self._directory / OWN, record, files=False))

    def _found(self, buffers: Iterable[str], groups: Sequence[Sequence[str]]) -> Manifest:
        """Returns what can be known of a checkpoint that another program saved."""
        by_adamw, by_muon = (
            [name for name in self._names if f"{self._states}{name}.{moment}" in self._entries]
            for moment in (ADAMW[0], MUON)
        )
        trained = [*by_adamw, *by_muon]
        if not trained:
            self._refuse("must have the optimizer's states under the parameters' names (got none)")
        read = self._read({f"{self._states}{name}.step": None for name in by_adamw})
        # Muon counts no steps.
        steps = dict.fromkeys(by_muon, 0.0) | {name: float(read[f"{self._states}{name}.step"]) for name in by_adamw}
        parameters = {}
        for name in self._names:
            shape = list(getattr(self._entries[self._model + name], "size", ()))
            parameters[name] = ParameterEntry(shape=shape, file="", step=steps.get(name))
        present = {name: self.entry(key) for name in buffers if (key := self._model + name) in self._entries}
        names, settings = self._groups(groups, trained)
        return Manifest(
            directory=self._directory,
            model="model",
            step=max(entry.step for entry in parameters.values() if entry.step is not None),
            states="fp32",
            files={},
            parameters=parameters,
            buffers={
                name: BufferEntry(dtype=name_of(entry.properties.dtype), shape=list(entry.size), persistent=True)
                for name, entry in present.items()
            },
            optimizer={"groups": settings, "group_names": names, "skipped_steps": 0},
            scheduler=None,
            random={"processes": []},
            extra=None,
        )

    def _groups(
        self, wanted: Sequence[Sequence[str]], trained: Sequence[str]
    ) -> tuple[list[list[str]], list[dict[str, Any]]]:
        """Returns names and settings of the groups; of a flat state dictionary, which has no groups, the ``wanted``."""
        root, _, inner = self._states.rpartition("state.")
        root += "param_groups."
        numbers = list(takewhile(lambda number: f"{root}{number}.params" in self._entries, count()))
        if numbers:
            saved = self._read({f"{root}{number}.params": None for number in numbers})
            names = [[name.removeprefix(inner) for name in saved[f"{root}{number}.params"]] for number in numbers]
            return names, self._settings([f"{root}{number}." for number in numbers])
        known = set(trained)
        settings = []
        for group in wanted:
            own = self._settings([f"{root}{inner}{name}." for name in group if name in known])
            if any(other != own[0] for other in own):
                self._refuse(f"must have the optimizer's groups (got several settings within that of {group[0]})")
            settings.append(own[0] if own else {})
        return [list(group) for group in wanted], settings

    def _settings(self, places: Sequence[str]) -> list[dict[str, Any]]:
        """Returns what stands at each of ``places``: AdamW's settings, or Muon's, which say so."""
        by_muon = {place for place in places if place + _OF_MUON in self._entries}
        kept = {
            place: _MUON_SETTINGS
            if place in by_muon
            else [*_SETTINGS, *(setting for setting in _KINDS if place + setting in self._entries)]
            for place in places
        }
        found = self._read({place + setting: None for place, settings in kept.items() for setting in settings})
        return [
            {setting: found[place + setting] for setting in settings} | ({"use_muon": True} if place in by_muon else {})
            for place, settings in kept.items()
        ]


class DistributedTensors:
    """Some tensors of a checkpoint, by names of ours; what :class:`UnitReader` is to our own files."""

    files: Sequence[str] = ()

    def __init__(self, checkpoint: DistributedCheckpoint, keys: Mapping[str, str]) -> None:
        self._checkpoint, self._keys = checkpoint, keys

    def __enter__(self) -> DistributedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def dtype(self, name: str) -> torch.dtype:
        """Returns what :meth:`read` returns of a weight: bfloat16, or float32, which float16 goes into."""
        kept = self._checkpoint.entry(self._keys[name]).properties.dtype
        return torch.bfloat16 if kept == torch.bfloat16 else torch.float32

    def read(self, name: str) -> Tensor:
        key = self._keys[name]
        return self._checkpoint.read(
            key, torch.empty(tuple(self._checkpoint.entry(key).size), dtype=self.dtype(name), device="cpu")
        )

    def read_to(self, name: str, target: Tensor) -> None:
        if target.is_cpu and target.is_contiguous():
            self._checkpoint.read(self._keys[name], target.detach())
        else:
            target.copy_(self.read(name))

    def read_buffer(self, name: str, entry: BufferEntry) -> Tensor:
        del entry  # it is in its own dtype
        return self._checkpoint.read(self._keys[name])


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, and shows what is ``wanted`` of them: a plan is made over all that it sees."""

    _metadata: Metadata | None = None
    wanted: tuple[str, ...] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        if self.wanted is None:
            return self._metadata
        entries = self._metadata.state_dict_metadata
        return replace(self._metadata, state_dict_metadata={key: entries[key] for key in self.wanted})


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Unpickles nothing but plain values, where torch's own would run what it finds."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _tails(key: str) -> list[str]:
    """Returns ``key`` and what is left of it without its first part, its first two and so on."""
    parts = key.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]
