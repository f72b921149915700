"""The manifest of a checkpoint: what its files hold, with checksums, and all that is no tensor of the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stronghold.errors import CheckpointError
from stronghold.formats.content import BUFFERS as BUFFERS
from stronghold.formats.content import check_content, parsed
from stronghold.formats.regular_file import open_regular
from stronghold.formats.sync import sync_directory
from stronghold.native import crc32c

FORMAT = 3
"""1 had no units in a store's own files, and 2 did not tell how buffers were built; both are read as well."""
_READ = (1, 2, FORMAT)
NAME = "manifest.json"
PARTIAL = f"{NAME}.partial"
_SUM = ',\n "crc32c": "'
"""What stands before the checksum of everything before it, which ends the file."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file; ``dtype`` by torch's name, ``crc32c`` that of its bytes."""

    dtype: str
    shape: list[int]
    crc32c: int

    @property
    def length_bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One safetensors file: the header has a checksum and every tensor one, so that no byte has none."""

    unit: str
    length_bytes: int
    header_bytes: int
    header_crc32c: int
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class PlacedEntry(TensorEntry):
    """One tensor of a unit's file in a store, from byte ``offset`` on."""

    offset: int


@dataclass(frozen=True, kw_only=True)
class UnitFileEntry:
    """One unit in a store, ``taken_bytes`` of it in use, the tensors at their places.

    It lies in the files ``parts``, in stripes of ``stripe_bytes`` in turn; the first one's name is the unit's.
    ``pages_crc32c`` is the CRC-32C of the CRC-32Cs of its pages in use, so that no byte of them has none.
    """

    unit: str
    parts: list[str]
    stripe_bytes: int
    length_bytes: int
    taken_bytes: int
    pages_crc32c: int
    tensors: Mapping[str, PlacedEntry]


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter: its file, and the steps that the optimizer took with it, None where it has no moments.

    Where ``file`` is a unit's in a store, ``beside`` has what the store held in memory, if it did.
    """

    shape: list[int]
    file: str
    step: float | None
    beside: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,) if self.beside is None else (self.file, self.beside)


@dataclass(frozen=True, kw_only=True)
class BufferEntry:
    """One buffer; ``dtype`` is its own, where the file may hold its bytes alone.

    ``built`` is the CRC-32C of its bytes as they were at ``offload``, None where it is ``persistent`` or not known.
    """

    dtype: str
    shape: list[int]
    persistent: bool
    built: int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint in ``directory``, without its tensors.

    ``files`` are by their names in it, or in other directories of the same store by their paths. ``optimizer``,
    ``scheduler``, ``random`` and ``extra`` are plain (:mod:`stronghold.checkpoint.plain`).
    """

    directory: Path
    model: str
    step: float
    states: str
    files: Mapping[str, FileEntry | UnitFileEntry]
    parameters: dict[str, ParameterEntry]
    buffers: dict[str, BufferEntry]
    optimizer: dict[str, Any]
    scheduler: Any
    random: Any
    extra: Any

    @property
    def in_place(self) -> bool:
        """Whether it lies in the directory of a store, which a run may open and change."""
        return any(isinstance(entry, UnitFileEntry) for entry in self.files.values())


def write_manifest(manifest: Manifest) -> None:
    """Writes ``manifest`` into its directory, whole or not at all. Raises OSError, naming the file."""
    write_partial(manifest)
    put_partial(manifest.directory)


def put_partial(directory: Path) -> None:
    """Gives the manifest that was written under another name its own."""
    (directory / PARTIAL).rename(directory / NAME)
    sync_directory(directory)


def write_partial(manifest: Manifest) -> None:
    """Writes ``manifest`` into its directory, under another name. Raises OSError, naming the file."""
    content = content_of(manifest)
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=True).removesuffix("\n}")
    data = text.encode("ascii") + f'{_SUM}{_crc(text.encode("ascii")):08x}"\n}}\n'.encode("ascii")
    path = manifest.directory / PARTIAL
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view, offset = memoryview(data), 0
        while len(view):
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
        os.fsync(file)
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    finally:
        os.close(file)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of the checkpoint in ``directory``.

    Raises CheckpointError where there is none, or it is cut off, altered or of another format.
    """
    path = Path(directory) / NAME
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint must be a directory with a {NAME} ({error.strerror}: {path}); pass another one"
        ) from error
    body, _, rest = data.rpartition(_SUM.encode("ascii"))
    if not body or rest != f'{_crc(body):08x}"\n}}\n'.encode("ascii"):
        raise CheckpointError(
            f"{path} is damaged: it is cut off or has been altered since it was written; pass another checkpoint"
        )
    return manifest_from(path, data)


def content_of(manifest: Manifest) -> dict[str, Any]:
    """Returns what JSON keeps of a manifest: all but its directory."""
    content = {"format": FORMAT, **asdict(manifest)}
    del content["directory"]
    return content


def manifest_from(path: Path, data: str | bytes, *, files: bool = True) -> Manifest:
    """Returns the manifest whose :func:`content_of` is in ``data``, from ``path``.

    Without ``files`` it is one of a checkpoint whose tensors are not in files of ours. Raises CheckpointError for other
    formats, and for what cannot be one.
    """
    try:
        content = parsed(data)
    except ValueError as error:
        raise CheckpointError(f"{path} has been altered: {error}; pass another checkpoint") from None
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found not in _READ:
        raise CheckpointError(
            f"a checkpoint must be of format {' or '.join(map(str, _READ))} (got format {found!r:.100} in "
            f"{path}); load it with the version of stronghold that saved it"
        )
    content.pop("crc32c", None)
    check_content(content, path, files=files)
    content["files"] = {name: _file_entry(file) for name, file in content["files"].items()}
    content["parameters"] = _entries(ParameterEntry, content["parameters"])
    content["buffers"] = _entries(BufferEntry, content["buffers"])
    return Manifest(directory=path.parent, **content)


def name_of(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, as entries have it."""
    return str(dtype).removeprefix("torch.")


def _file_entry(plain: dict[str, Any]) -> FileEntry | UnitFileEntry:
    if "pages_crc32c" in plain:
        return UnitFileEntry(**{**plain, "tensors": _entries(PlacedEntry, plain["tensors"])})
    return FileEntry(**{**plain, "tensors": _entries(TensorEntry, plain["tensors"])})


def _entries(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kind(**entry) for name, entry in plain.items()}


def _crc(data: bytes) -> int:
    return crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))
