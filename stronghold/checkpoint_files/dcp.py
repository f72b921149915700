"""Reads what ``torch.distributed.checkpoint`` wrote, tensor by tensor.

Nothing in it has a checksum, and its ``.metadata`` is a pickle: read one only from somebody you trust.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from stronghold.checkpoint_files.manifest import BufferEntry, Manifest, ParameterEntry
from stronghold.errors import CheckpointError

T = TypeVar("T")

MODEL, OPTIMIZER = "model", "optimizer"
"""What :func:`stronghold.checkpoint.save` writes weights and optimizer under."""
OWN, RECORD, BUFFERS = "stronghold", "manifest", "buffers"
"""What it writes the rest under: the manifest as JSON, and the buffers that no ``state_dict()`` has."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self._entries = self._told(self._reader.read_metadata).state_dict_metadata
        self._model = self._prefix(self._names, "", f"{MODEL}.")
        moments = {tail for key in self._entries if key.endswith(".exp_avg") for tail in _tails(key)}
        trained = [name for name in self._names if f"{name}.exp_avg" in moments]
        self._states = self._prefix(trained, ".exp_avg", f"{OPTIMIZER}.state.") if trained else ""
        own = f"{OWN}.{RECORD}" in self._entries
        if not own and not trained:
            raise CheckpointError(
                f"a checkpoint must have the optimizer's states under the parameters' names (got none in {directory}); "
                "save get_optimizer_state_dict() of torch.distributed.checkpoint.state_dict with the model"
            )
        self.manifest = self._recorded() if own else self._found(set(trained), buffers, groups)

    def unit(self, names: Iterable[str]) -> DistributedTensors:
        """Returns the tensors of the parameters called ``names``, by the names that our own files have for them."""
        keys = {name: self._model + name for name in names}
        keys |= {f"{name}/{moment}": f"{self._states}{name}.{moment}" for name in names for moment in _MOMENTS}
        return DistributedTensors(self, {name: key for name, key in keys.items() if key in self._entries})

    def buffers(self) -> DistributedTensors:
        prefixes = {True: self._model, False: f"{OWN}.{BUFFERS}."}
        known = self.manifest.buffers.items()
        return DistributedTensors(self, {name: prefixes[entry.persistent] + name for name, entry in known})

    def entry(self, key: str) -> TensorStorageMetadata:
        return self._entries[key]  # type: ignore[return-value]

    def read(self, key: str, target: Tensor | None = None) -> Any:
        """Returns what is called ``key``: a tensor in ``target``, if that is given, in the dtype it has."""
        if key not in self._entries:
            raise CheckpointError(
                f"a checkpoint must have the optimizer's settings (it has no {key}, in {self._directory})"
            )
        entry = self._entries[key]
        if target is None and isinstance(entry, TensorStorageMetadata):
            target = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        state = {key: target}
        self._told(lambda: self._load(state))
        return state[key]

    def _load(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each process reads for itself
            dcp.load(state, storage_reader=self._reader, planner=_Planner(), no_dist=True)

    def _told(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (Exception, dcp.CheckpointException) as error:  # a pickle raises anything
            cause = first_failure(error) if isinstance(error, dcp.CheckpointException) else error
            if not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
            raise CheckpointError(
                f"{self._directory} could not be read as a checkpoint of torch.distributed.checkpoint "
                f"({type(cause).__name__}: {cause}); pass another one"
            ) from cause

    def _prefix(self, names: Sequence[str], suffix: str, usual: str) -> str:
        """Returns what stands before all ``names``."""
        first = names[0] + suffix
        found = {key.removesuffix(first) for key in self._entries if key == first or key.endswith(f".{first}")}
        absent = {
            prefix: [key for name in names if (key := f"{prefix}{name}{suffix}") not in self._entries]
            for prefix in found or {usual}
        }
        whole = [prefix for prefix in sorted(absent) if not absent[prefix]]
        if usual in whole:
            return usual
        if len(whole) == 1:
            return whole[0]
        nearest = min(absent.values(), key=len)
        got = f"they are under {' and '.join(map(repr, whole))}" if whole else f"it has no {nearest[0]}"
        raise CheckpointError(
            f"a checkpoint must have all of the model's parameters once ({got}, in {self._directory}); build the model "
            f"that was saved, or save it under {usual!r}"
        )

    def _recorded(self) -> Manifest:
        content = json.loads(self.read(f"{OWN}.{RECORD}"))
        content["parameters"] = {name: ParameterEntry(**entry) for name, entry in content["parameters"].items()}
        content["buffers"] = {name: BufferEntry(**entry) for name, entry in content["buffers"].items()}
        return Manifest(directory=self._directory, **content)

    def _found(self, trained: set[str], buffers: Iterable[str], groups: Sequence[Sequence[str]]) -> Manifest:
        """Returns what can be known of a checkpoint that another program saved."""
        parameters = {}
        for name in self._names:
            step = float(self.read(f"{self._states}{name}.step")) if name in trained else None
            parameters[name] = ParameterEntry(shape=list(self.entry(self._model + name).size), file="", step=step)
        present = {name: self.entry(key) for name in buffers if (key := self._model + name) in self._entries}
        names, settings = self._groups(groups)
        return Manifest(
            directory=self._directory,
            model="model",
            step=max(entry.step for entry in parameters.values() if entry.step is not None),
            states="fp32",
            files={},
            parameters=parameters,
            buffers={
                name: BufferEntry(dtype=_name(entry.properties.dtype), shape=list(entry.size), persistent=True)
                for name, entry in present.items()
            },
            optimizer={"groups": settings, "group_names": names, "skipped_steps": 0},
            scheduler=None,
            random={"processes": []},
            extra=None,
        )

    def _groups(self, wanted: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[dict[str, Any]]]:
        """Returns names and settings of the groups; of a flat state dictionary, which has no groups, the ``wanted``."""
        key = self._states.removesuffix("state.") + "param_groups"
        numbers = list(takewhile(lambda number: f"{key}.{number}.params" in self._entries, count()))
        names = [self.read(f"{key}.{number}.params") for number in numbers] or [list(group) for group in wanted]
        kept = [f"{key}.{number}" for number in numbers] or [f"{key}.{group[0]}" for group in names]
        return names, [{setting: self.read(f"{place}.{setting}") for setting in _SETTINGS} for place in kept]


def first_failure(error: dcp.CheckpointException) -> BaseException:
    """Returns what the first process that failed raised."""
    return error.failures[min(error.failures)][0]


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
        dtype = self._checkpoint.entry(self._keys[name]).properties.dtype
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise CheckpointError(f"weights must be in fp32, bf16 or fp16 (got {dtype} for {self._keys[name]})")
        return torch.float32 if dtype == torch.float16 else dtype

    def read(self, name: str) -> Tensor:
        key = self._keys[name]
        return self._checkpoint.read(key, torch.empty(tuple(self._checkpoint.entry(key).size), dtype=self.dtype(name)))

    def read_to(self, name: str, target: Tensor) -> None:
        if target.is_cpu and target.is_contiguous():
            self._checkpoint.read(self._keys[name], target.detach())
        else:
            target.copy_(self.read(name))

    def read_buffer(self, name: str, entry: BufferEntry) -> Tensor:
        del entry  # it is in its own dtype
        return self._checkpoint.read(self._keys[name])


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Unpickles nothing but plain values, where torch's own would run what it finds."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _tails(key: str) -> list[str]:
    """Returns ``key`` and what is left of it without its first part, its first two and so on."""
    parts = key.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
