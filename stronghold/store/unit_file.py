"""One unit's memory on disk: a file, mapped for whoever looks at a tensor, read and written past the cache by us."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stronghold.checkpoint_files.manifest import PlacedEntry, UnitFileEntry
from stronghold.device.memory import HostBuffer, MappedBuffer
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.layout import PAGE_BYTES, round_up
from stronghold.native import Disk, Transfer, checksums, crc32c, warn_of_no_reserve

_READ_AT_ONCE = 32 * 2**20


def file_bytes(capacity_bytes: int) -> int:
    """Returns how long a unit's file is; what is not taken of it is not there."""
    return max(PAGE_BYTES, round_up(capacity_bytes, PAGE_BYTES))


class UnitFile:
    """A file of up to ``capacity_bytes``, of which as much is reserved as has been taken.

    It is mapped once, whole, so that a tensor in it is an ordinary one: who reads or writes such a tensor goes through
    the system's page cache, and the system keeps that coherent with direct transfers as long as the two take turns,
    which is what the engine's events are for. Every page has a checksum, zero where it is not known: a direct write
    sets it, a direct read compares, and whoever may write through the mapping makes it unknown.

    One that was kept is opened with what it holds in its first ``kept_bytes``: they are taken again in the same order,
    and found as they were left.

    Raises DiskError where the system refuses, StoreError for a device with blocks larger than a page.
    """

    def __init__(self, disk: Disk, path: Path, name: str, capacity_bytes: int, kept_bytes: int = 0) -> None:
        self.path = path
        self.name = name
        self.kept_bytes = kept_bytes
        """Part of a checkpoint in place; 0 for a file that is none."""
        self._disk = disk
        self.capacity_bytes = file_bytes(capacity_bytes)
        if not kept_bytes:
            path.unlink(missing_ok=True)
        self.file = disk.open(path, create=not kept_bytes)
        if self.file.alignment > PAGE_BYTES:
            raise StoreError(
                f"a disk must take direct transfers in blocks of {PAGE_BYTES} bytes or fewer (that of {path} wants "
                f"{self.file.alignment}); use a directory on another file system"
            )
        if not kept_bytes:
            os.truncate(path, self.capacity_bytes)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.capacity_bytes)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self.taken_bytes = 0
        self.sums = torch.zeros(self.capacity_bytes // PAGE_BYTES, dtype=torch.int32)
        self.writes: list[Transfer] = []
        """Under way, of the newest update."""
        self._versions: dict[int, int] = {}

    def take(self, length_bytes: int) -> MappedBuffer:
        """Reserves the next part of the file and returns it as memory: all zero, or as it was kept."""
        begin, length = self.taken_bytes, round_up(length_bytes, PAGE_BYTES)
        assert begin + length <= self.capacity_bytes, "a unit takes more than its file was made for"
        if not self.file.reserve(begin + length):
            warn_of_no_reserve(str(self.path))
        self.taken_bytes = begin + length
        return MappedBuffer(self._memory, length_bytes, begin)

    @property
    def used_bytes(self) -> int:
        return max(self.taken_bytes, self.kept_bytes)

    def find(self, tensor: Tensor) -> int | None:
        """Returns where in the file a tensor lies, in bytes, or None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.capacity_bytes else None

    def sums_of(self, begin: int, end: int) -> Tensor:
        """Returns the checksums of the whole pages from ``begin`` to ``end``, in bytes."""
        return self.sums[begin // PAGE_BYTES : end // PAGE_BYTES]

    def sum_up(self) -> None:
        """Sets the checksums to those of what the mapping holds."""
        if self.taken_bytes:
            memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=self.taken_bytes)
            checksums(memory, self.sums_of(0, self.taken_bytes))

    def forget_sums(self) -> None:
        """Hears that somebody may write through the mapping from now on."""
        self.sums.zero_()

    def check_versions(self, tensors: Sequence[Tensor]) -> None:
        """Forgets the checksums where somebody has written one of ``tensors``, by their versions, since the last time.

        A moment is a plain tensor to its user; parameters tell of writes themselves.
        """
        for tensor in tensors:
            place, version = tensor.data_ptr(), tensor._version
            if self._versions.setdefault(place, version) != version:
                self.forget_sums()
                self._versions[place] = version

    def drop(self) -> None:
        """Takes the pages that were looked at out of the process's resident set; their contents stay."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def wait(self, transfer: Transfer) -> None:
        """Blocks until a transfer of this file is done; raises what made it fail, with the unit's name."""
        try:
            transfer.wait()
        except (DiskError, CorruptionError) as error:
            if not error.message.startswith(self.name):
                error.message = f"{self.name}: {error.message}"
            raise

    def settled(self) -> bool:
        """Whether nothing is on its way into the file; raises what made a write fail."""
        under_way = []
        for transfer in self.writes:
            if transfer.done():
                self.wait(transfer)
            else:
                under_way.append(transfer)
        self.writes = under_way
        return not under_way

    def settle(self) -> None:
        """Blocks until what is on its way into the file has arrived; raises what made it fail."""
        for transfer in list(self.writes):
            self.wait(transfer)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Reads all that is used and compares the checksums; yields (begin, bytes) while what follows is read.

        Raises CorruptionError.
        """
        size = min(_READ_AT_ONCE, self.used_bytes)
        targets = [HostBuffer(size).flat for _ in range(2)]
        waiting: list[tuple[int, Tensor, Transfer]] = []
        for number, begin in enumerate([*range(0, self.used_bytes, _READ_AT_ONCE), None]):
            if begin is not None:
                target = targets[number % 2][: self.used_bytes - begin]
                sums = self.sums_of(begin, begin + len(target))
                waiting.append(
                    (begin, target, self._disk.read(self.file, target, offset=begin, sums=sums, verify=True))
                )
            if waiting and (begin is None or number):
                before, target, transfer = waiting.pop(0)
                self.wait(transfer)
                yield before, target

    def verify(self) -> None:
        """Reads all of it and compares the checksums. Raises CorruptionError."""
        for _ in self.pieces():
            pass

    def entry(self, tensors: Mapping[str, Tensor]) -> UnitFileEntry:
        """Syncs the file and returns what a checkpoint's manifest says of it and of the ``tensors`` that lie in it.

        Reads all of it, and compares the checksums; those that were not known are from now on. Raises DiskError and
        CorruptionError.
        """
        self.settle()
        self.kept_bytes = self.used_bytes
        try:
            self.file.sync()
        except DiskError as error:
            error.message = f"{self.name}: {error.message}"
            raise
        offsets = {name: offset for name, tensor in tensors.items() if (offset := self.find(tensor)) is not None}
        crcs = dict.fromkeys(offsets, 0)
        for begin, piece in self.pieces():
            end = begin + len(piece)
            if not (sums := self.sums_of(begin, end)).all():
                checksums(piece, sums)
            for name, offset in offsets.items():
                first, last = max(begin, offset), min(end, offset + tensors[name].nbytes)
                if first < last:
                    crcs[name] = crc32c(piece[first - begin : last - begin], crcs[name])
        return UnitFileEntry(
            unit=self.name,
            length_bytes=self.capacity_bytes,
            taken_bytes=self.used_bytes,
            pages_crc32c=self._sum_of_sums(),
            tensors={
                name: PlacedEntry(
                    dtype=str(tensors[name].dtype).removeprefix("torch."),
                    shape=list(tensors[name].shape),
                    crc32c=crcs[name],
                    offset=offset,
                )
                for name, offset in offsets.items()
            },
        )

    def take_sums(self, entry: UnitFileEntry) -> bool:
        """Reads all that was kept and sets the checksums; returns whether it is what ``entry`` says."""
        for begin in range(0, self.kept_bytes, _READ_AT_ONCE):
            end = min(begin + _READ_AT_ONCE, self.kept_bytes)
            target = HostBuffer(end - begin).flat
            self.wait(self._disk.read(self.file, target, offset=begin, sums=self.sums_of(begin, end)))
        return self._sum_of_sums() == entry.pages_crc32c

    def _sum_of_sums(self) -> int:
        return crc32c(self.sums_of(0, self.used_bytes))
