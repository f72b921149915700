"""One unit's memory on disk: a file, mapped for whoever looks at a tensor, read and written past the cache by us."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stronghold.device.memory import HostBuffer, MappedBuffer
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.layout import PAGE_BYTES, round_up
from stronghold.native import Disk, Transfer, checksums

_VERIFIED_AT_ONCE = 64 * 2**20


class UnitFile:
    """A file of up to ``capacity_bytes``, of which as much is reserved as has been taken.

    It is mapped once, whole, so that a tensor in it is an ordinary one: who reads or writes such a tensor goes through
    the system's page cache, and the system keeps that coherent with direct transfers as long as the two take turns,
    which is what the engine's events are for. Every page has a checksum, zero where it is not known: a direct write
    sets it, a direct read compares, and whoever may write through the mapping makes it unknown.

    Raises DiskError where the system refuses, StoreError for a device with blocks larger than a page.
    """

    def __init__(self, disk: Disk, path: Path, name: str, capacity_bytes: int) -> None:
        self.path = path
        self.name = name
        self._disk = disk
        self._capacity = max(PAGE_BYTES, round_up(capacity_bytes, PAGE_BYTES))
        path.unlink(missing_ok=True)
        self.file = disk.open(path, create=True)
        if self.file.alignment > PAGE_BYTES:
            raise StoreError(
                f"a disk must take direct transfers in blocks of {PAGE_BYTES} bytes or fewer (that of {path} wants "
                f"{self.file.alignment}); use a directory on another file system"
            )
        os.truncate(path, self._capacity)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._capacity)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self.taken_bytes = 0
        self.sums = torch.zeros(self._capacity // PAGE_BYTES, dtype=torch.int32)
        self.writes: list[Transfer] = []
        """Under way, of the newest update."""
        self._versions: dict[int, int] = {}

    def take(self, length_bytes: int) -> MappedBuffer:
        """Reserves the next part of the file, all zero, and returns it as memory."""
        begin, length = self.taken_bytes, round_up(length_bytes, PAGE_BYTES)
        assert begin + length <= self._capacity, "a unit takes more than its file was made for"
        self.file.reserve(begin + length)
        self.taken_bytes = begin + length
        return MappedBuffer(self._memory, length_bytes, begin)

    def find(self, tensor: Tensor) -> int | None:
        """Returns where in the file a tensor lies, in bytes, or None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._capacity else None

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

    def verify(self) -> None:
        """Reads all of it and compares the checksums. Raises CorruptionError."""
        target = HostBuffer(min(_VERIFIED_AT_ONCE, self.taken_bytes), private=True).flat
        for begin in range(0, self.taken_bytes, _VERIFIED_AT_ONCE):
            end = min(begin + _VERIFIED_AT_ONCE, self.taken_bytes)
            sums = self.sums_of(begin, end)
            self.wait(self._disk.read(self.file, target[: end - begin], offset=begin, sums=sums, verify=True))
