"""Reads a checkpoint's files back, and lets nothing through that is not what was written."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from stronghold.errors import CheckpointError, CorruptionError
from stronghold.formats.content import parsed
from stronghold.formats.manifest import (
    BUFFERS,
    BufferEntry,
    Manifest,
    TensorEntry,
    UnitFileEntry,
    read_manifest,
)
from stronghold.formats.moments import moment_in, wrong_moment
from stronghold.formats.regular_file import open_regular
from stronghold.formats.stripes import Stripes
from stronghold.native import crc32c

_READ_BYTES = 16 * 2**20


def verify(manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Reads every byte of a checkpoint, or of some of its ``files``.

    Raises CheckpointError or CorruptionError, naming file and unit: the latter for what is not what was written, the
    former also for moments that are, and that AdamW cannot go on from.
    """
    for name in manifest.files if files is None else files:
        with FileReader(manifest, name) as file:
            for tensor in file.entry.tensors:
                file.check(tensor)


class Checkpoint:
    """One of our own, in ``directory``. Raises CheckpointError where it is absent or damaged."""

    def __init__(self, directory: Path) -> None:
        self.manifest = read_manifest(directory)

    def unit(self, names: Iterable[str]) -> UnitReader:
        """Returns the tensors of the parameters called ``names``, a unit's."""
        return UnitReader(self.manifest, names)

    def buffers(self) -> FileReader:
        return FileReader(self.manifest, BUFFERS)


class FileReader:
    """One file of a checkpoint in the safetensors format, or all those of a unit in a store.

    Raises CheckpointError where it is absent or has another size.
    """

    def __init__(self, manifest: Manifest, name: str) -> None:
        self.entry = manifest.files[name]
        self._parameters = manifest.parameters
        parts, stripe_bytes = [name], max(1, self.entry.length_bytes)
        if isinstance(self.entry, UnitFileEntry):
            parts, stripe_bytes = self.entry.parts, self.entry.stripe_bytes
        self.paths = [manifest.directory / part for part in parts]
        self._stripes = Stripes(len(parts), stripe_bytes)
        with ExitStack() as opened:
            self._files = [opened.enter_context(self._open(number)) for number in range(len(parts))]
            self._begins = self._find_tensors()
            self._opened = opened.pop_all()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return name in self.entry.tensors

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.entry.tensors[name].dtype)

    def check(self, name: str) -> None:
        """Reads a tensor and forgets it.

        Raises CorruptionError where it is not what was written, and CheckpointError where it is not what can be loaded.
        """
        length = self._length(name)
        piece = torch.empty(min(length, _READ_BYTES), dtype=torch.uint8, device="cpu")
        crc, wrong = 0, None
        for begin in range(0, length, _READ_BYTES):
            part = piece[: min(_READ_BYTES, length - begin)]
            self._fill(part, self._begins[name] + begin)
            crc = crc32c(part, crc)
            wrong = wrong or self.wrong(name, part)
        self._compare(crc, self.entry.tensors[name].crc32c, self._begins[name], length, name)
        if wrong:
            raise wrong

    def wrong(self, name: str, octets: Tensor) -> CheckpointError | None:
        """Returns what is raised for what a tensor holds, or None; ``octets`` are whole numbers of it."""
        moment = moment_in(name, self._parameters)
        whole = moment and not (self.dtype(name) == torch.uint8 and f"{name}/exponents" in self.entry.tensors)
        if not whole or not (rule := wrong_moment(octets.view(self.dtype(name)), str(moment))):
            return None
        return CheckpointError(
            f"{name} {rule}, in {', '.join(map(str, self.paths))}, and AdamW would make weights of it; load another "
            "checkpoint"
        )

    def read(self, name: str) -> Tensor:
        """Returns a tensor. Raises CorruptionError where it is not what was written."""
        entry = self.entry.tensors[name]
        tensor = torch.empty(entry.shape, dtype=self.dtype(name), device="cpu")
        self._read_into(name, tensor)
        return tensor

    def read_to(self, name: str, target: Tensor) -> None:
        """Reads a tensor of the dtype of ``target`` into it, wherever it is; where it can be, without a copy."""
        if target.is_cpu and target.is_contiguous():
            self._read_into(name, target.detach())
        else:
            target.copy_(self.read(name))

    def read_buffer(self, name: str, entry: BufferEntry) -> Tensor:
        """Returns a buffer, in its own dtype."""
        saved = self.read(name)
        dtype = getattr(torch, entry.dtype)
        return saved if saved.dtype == dtype else saved.view(dtype).view(entry.shape)

    def _open(self, number: int) -> IO[bytes]:
        path, wanted = self.paths[number], self._stripes.share(number, self.entry.length_bytes)
        try:
            file = open_regular(path)
        except OSError as error:
            raise CheckpointError(
                f"the file of {self.entry.unit} cannot be read ({error.strerror}: {path}); load another checkpoint"
            ) from error
        size = os.fstat(file.fileno()).st_size
        if size != wanted:
            file.close()
            raise CheckpointError(
                f"the file of {self.entry.unit} must have {wanted} bytes (got {size}: {path}); load another checkpoint"
            )
        return file

    def _find_tensors(self) -> dict[str, int]:
        """Returns where each tensor begins."""
        if isinstance(self.entry, UnitFileEntry):
            return {name: tensor.offset for name, tensor in self.entry.tensors.items()}
        header_bytes = self.entry.header_bytes
        header = torch.empty(header_bytes, dtype=torch.uint8, device="cpu")
        self._fill(header, 0)
        self._compare(crc32c(header), self.entry.header_crc32c, 0, header_bytes, "header")
        try:
            places = parsed(header.numpy().tobytes()[8:])
            return {name: header_bytes + self._begin(name, places[name]["data_offsets"]) for name in self.entry.tensors}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the header of {self.paths[0]}, the file of {self.entry.unit}, must have the places of its tensors "
                f"({type(error).__name__}: {error}); load another checkpoint"
            ) from error

    def _begin(self, name: str, offsets: Any) -> int:
        """Returns where a tensor begins behind the header, by what that says. Raises TypeError and ValueError."""
        begin, end = map(operator.index, offsets)
        if not (0 <= begin <= end <= self.entry.length_bytes and end - begin == self._length(name)):
            raise ValueError(f"{name} lies from {begin} to {end}")
        return begin

    def _read_into(self, name: str, target: Tensor) -> None:
        length, entry = self._length(name), self.entry.tensors[name]
        assert target.nbytes == length and target.dtype is self.dtype(name), "a tensor is read into another one's place"
        if not length:
            return
        octets = target.view(-1).view(torch.uint8)
        self._fill(octets, self._begins[name])
        self._compare(crc32c(octets), entry.crc32c, self._begins[name], length, name)

    def _length(self, name: str) -> int:
        entry: TensorEntry = self.entry.tensors[name]
        return entry.length_bytes

    def _fill(self, target: Tensor, offset: int) -> None:
        memory = memoryview(target.numpy())  # type: ignore[arg-type]
        for span in self._stripes.spans(offset, offset + len(memory)):
            for view, begin in _pieces(memory[span.begin - offset : span.end - offset], span.offset):
                while len(view):
                    count = os.preadv(self._files[span.file].fileno(), [view], begin)
                    if not count:
                        raise CheckpointError(
                            f"the file of {self.entry.unit} ended at byte {begin} while it was read "
                            f"({self.paths[span.file]}); load another checkpoint"
                        )
                    view, begin = view[count:], begin + count

    def _compare(self, found: int, expected: int, offset: int, length: int, what: str) -> None:
        if found != expected:
            paths = ", ".join(map(str, self.paths))
            raise CorruptionError(
                f"the file of {self.entry.unit} is damaged: {what} is not what was written ({length} bytes at byte "
                f"{offset} of {paths} have CRC-32C {found:08x}, written {expected:08x}); load another checkpoint",
                paths,
                offset,
                length,
                expected,
                found,
            )


class UnitReader:
    """The files of the parameters called ``names``, a unit's, as one. Raises what :class:`FileReader` does."""

    def __init__(self, manifest: Manifest, names: Iterable[str]) -> None:
        self.files = list(dict.fromkeys(file for name in names for file in manifest.parameters[name].files))
        with ExitStack() as stack:
            opened = [stack.enter_context(FileReader(manifest, file)) for file in self.files]
            self._stack = stack.pop_all()
        self._of = {tensor: file for file in opened for tensor in file.entry.tensors}

    def __enter__(self) -> UnitReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def dtype(self, name: str) -> torch.dtype:
        return self._of[name].dtype(name)

    def read(self, name: str) -> Tensor:
        return self._of[name].read(name)

    def read_to(self, name: str, target: Tensor) -> None:
        self._of[name].read_to(name, target)


def _pieces(view: memoryview, offset: int) -> Iterator[tuple[memoryview, int]]:
    for begin in range(0, len(view), _READ_BYTES):
        yield view[begin : begin + _READ_BYTES], offset + begin
