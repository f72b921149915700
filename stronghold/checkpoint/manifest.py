"""The manifest of a checkpoint: what its files hold, with checksums, and all that is no tensor of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stronghold.errors import CheckpointError
from stronghold.native import crc32c

FORMAT = 1
NAME = "manifest.json"
_SUM = ',\n "crc32c": "'
"""What stands before the checksum of everything before it, which ends the file."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file; ``dtype`` by torch's name, ``crc32c`` that of its bytes."""

    dtype: str
    shape: list[int]
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One safetensors file: the header has a checksum and every tensor one, so that no byte has none."""

    unit: str
    length_bytes: int
    header_bytes: int
    header_crc32c: int
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter: its file, and the steps that AdamW has taken with it, None where it has no moments."""

    shape: list[int]
    file: str
    step: float | None


@dataclass(frozen=True, kw_only=True)
class BufferEntry:
    """One buffer; ``dtype`` is its own, where the file may hold its bytes alone."""

    dtype: str
    shape: list[int]
    persistent: bool


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint in ``directory``, without its tensors. ``optimizer``, ``scheduler``, ``random`` and ``extra`` are
    plain (:mod:`stronghold.checkpoint.plain`)."""

    directory: Path
    model: str
    step: float
    states: str
    files: dict[str, FileEntry]
    parameters: dict[str, ParameterEntry]
    buffers: dict[str, BufferEntry]
    optimizer: dict[str, Any]
    scheduler: Any
    random: Any
    extra: Any


def write_manifest(manifest: Manifest) -> None:
    """Writes ``manifest`` into its directory and syncs it. Raises OSError, naming the file."""
    content = {"format": FORMAT, **asdict(manifest)}
    del content["directory"]
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=True).removesuffix("\n}")
    data = text.encode("ascii") + f'{_SUM}{_crc(text.encode("ascii")):08x}"\n}}\n'.encode("ascii")
    path = manifest.directory / NAME
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view, offset = memoryview(data), 0
        while len(view):
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    finally:
        os.close(file)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of the checkpoint in ``directory``.

    Raises CheckpointError where there is none, or it is cut off, altered or of another format.
    """
    path = Path(directory) / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint must be a directory with a {NAME} ({error.strerror}: {path}); pass another one"
        ) from error
    body, _, rest = data.rpartition(_SUM.encode("ascii"))
    if not body or rest != f'{_crc(body):08x}"\n}}\n'.encode("ascii"):
        raise CheckpointError(
            f"{path} is damaged: it is cut off or has been altered since it was written; pass another checkpoint"
        )
    content = json.loads(data)
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"a checkpoint must be of format {FORMAT} (got format {content['format']} in {path}); load it with the "
            "version of stronghold that saved it"
        )
    del content["format"], content["crc32c"]
    content["files"] = {
        name: FileEntry(**{**file, "tensors": _entries(TensorEntry, file["tensors"])})
        for name, file in content["files"].items()
    }
    content["parameters"] = _entries(ParameterEntry, content["parameters"])
    content["buffers"] = _entries(BufferEntry, content["buffers"])
    return Manifest(directory=Path(directory), **content)


def _entries(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kind(**entry) for name, entry in plain.items()}


def _crc(data: bytes) -> int:
    return crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))
