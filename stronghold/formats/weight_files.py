"""A checkpoint's safetensors files, read tensor by tensor."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DESCRIPTORS = Path("/proc/self/fd")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. ``dtype`` is as the format names it, such as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors in a folder: those of ``model.safetensors``, or of the shards that its index names.

    Opening reads the headers alone and keeps the files open, so that all tensors are of one model, whatever takes its
    place in the folder. Without /proc, or with more files than half of what the process may still open, the others are
    opened anew by their paths. It is the path of the folder, too. Raises ValueError for files that are written in place
    meanwhile, or replaced where they are not open; for a folder without such files, and for files that are not what
    they should be.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, Entry] = {}
        """By name."""
        self.notes: dict[str, str] = {}
        """The texts beside the tensors, of all files."""
        self._files: dict[Path, _Shard] = {}
        self._most_open = _most_open()
        index = self._read_index()
        for file in sorted(set(index.values())) if index else [SINGLE]:
            for name, entry in self._headers(self.directory / file).items():
                if index.get(name, file) == file:
                    self.entries[name] = entry
        self.check_in_place()  # behind all: they were there together
        if lost := sorted(index.keys() - self.entries.keys()):
            raise ValueError(
                f"a checkpoint's shards must hold what its index names (in {str(directory)!r} missing {some(lost)}); "
                "download it again"
            )

    def __fspath__(self) -> str:
        return str(self.directory)

    def check_in_place(self) -> None:
        """Raises ValueError where what is read is in the folder no more: another file read since may not belong to it.

        Files are told apart by size and time alone: on FUSE their numbers change.
        """
        for file in self._files.values():
            if not file.is_in_place():
                raise _replaced(file.path)

    def dtype(self) -> torch.dtype | None:
        """Returns the dtype of the first floating-point tensor, or None where there is none."""
        return next((_DTYPES[entry.dtype] for entry in self.entries.values() if entry.dtype in _DTYPES), None)

    def is_floating(self, name: str) -> bool:
        return self.entries[name].dtype in _DTYPES

    def read(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU, in its own dtype. It takes memory only while it is in use."""
        return self._read(name, self.entries[name])

    def is_kept(self, name: str) -> bool:
        """Whether a weight is quantised in the files; no such are read here."""
        return False

    def _read(self, name: str, entry: Entry) -> Tensor:
        from safetensors import SafetensorError, safe_open

        found = self._files[entry.file]
        try:
            # Opened anew for each: the tensor is a part of the mapped file, and unmapping that is what gives back the
            # pages of all that was read before.
            with safe_open(found.name, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            if found.is_unchanged() and found.is_in_place():
                raise _unreadable(entry.file, error) from error
            raise _replaced(entry.file) from error
        if not found.is_unchanged():  # behind: what was opened can be no later one then
            raise _replaced(entry.file)
        return tensor

    def _read_index(self) -> dict[str, str]:
        """Returns the file of each name, or nothing where one file holds all."""
        if (self.directory / SINGLE).is_file():
            return {}
        path = self.directory / INDEX
        if not path.is_file():
            raise ValueError(
                f"a checkpoint must be a folder with {SINGLE}, or with shards and {INDEX} (got "
                f"{str(self.directory)!r}); for other formats load the model whole and save it with save_pretrained()"
            )
        try:
            index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            wrong = [file for file in index.values() if Path(file).name != file]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(path, error) from error
        if wrong or not index:
            raise _unreadable(path, f"its weight_map must name files beside it, got {wrong[:1] or 'none'}")
        return index

    def _headers(self, path: Path) -> dict[str, Entry]:
        from safetensors import SafetensorError, safe_open

        try:
            opened = self._files[path] = _Shard(path, stays_open=len(self._files) < self._most_open)
            with safe_open(opened.name, framework="pt") as file:
                self.notes.update(file.metadata() or {})
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {n: Entry(path, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error


def some(names: list[str]) -> str:
    """Returns the first of ``names``, and how many more there are."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


class _Shard:
    """A file as it was when this was made, by ``name`` even when it has been replaced since, if it ``stays_open``.

    It is closed when nothing refers to this any more. A process that is forked has a descriptor of its own.
    """

    def __init__(self, path: Path, *, stays_open: bool) -> None:
        self.path = path
        self._found: Path | int = path
        self.name = str(path)
        if stays_open:
            self._found = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._found)
            self.name = str(_DESCRIPTORS / str(self._found))
        self._state = _state(self._found)

    def is_unchanged(self) -> bool:
        """Whether what is read by ``name`` is what it was."""
        return _state(self._found) == self._state

    def is_in_place(self) -> bool:
        """Whether the path still names it."""
        return _state(self.path) == self._state


def _state(file: Path | int) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _most_open() -> int:
    """Returns how many files to keep open: half of what this process may still open, none where there is no /proc."""
    if not _DESCRIPTORS.is_dir():
        return 0
    import resource  # which not every system has

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (most - len(os.listdir(_DESCRIPTORS))) // 2 if most != resource.RLIM_INFINITY else 2**16


def _replaced(path: Path) -> ValueError:
    return ValueError(
        f"a checkpoint must stay as it is while it is read (got {str(path)!r}, which was replaced, changed or removed "
        "meanwhile); load it again, and save beside what is being read"
    )


def _unreadable(path: Path, reason: object) -> ValueError:
    return ValueError(f"cannot read {str(path)!r} ({reason}); is it whole? download or save it again")
