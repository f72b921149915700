"""One unit's memory on disk: mapped for whoever looks at a tensor, read and written past the cache by us."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stronghold.device import Device
from stronghold.device.memory import HostBuffer, MappedBuffer
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.layout import PAGE_BYTES, round_up
from stronghold.native import Disk, DiskFile, Priority, Transfer, checksums
from stronghold.store.stripes import Stripes, map_striped

_VERIFIED_AT_ONCE = 64 * 2**20


class UnitFile:
    """Up to ``capacity_bytes`` in a file, or in stripes in several, of which as much is reserved as has been taken.

    They are mapped once, whole, so that a tensor in them is an ordinary one: who reads or writes such a tensor goes
    through the system's page cache, and the system keeps that coherent with direct transfers as long as the two take
    turns, which is what the engine's events are for. Every page has a checksum, zero where it is not known: a direct
    write sets it, a direct read compares, and whoever may write through the mapping makes it unknown.

    Raises DiskError where the system refuses, StoreError for a device with blocks larger than a page.
    """

    def __init__(self, disk: Disk, device: Device, paths: Sequence[Path], name: str, capacity_bytes: int) -> None:
        self.paths = list(paths)
        self.name = name
        self._disk = disk
        self._device = device
        self._capacity = max(PAGE_BYTES, round_up(capacity_bytes, PAGE_BYTES))
        self._stripes = Stripes.over(len(self.paths), self._capacity)
        self._files = [self._open(path) for path in self.paths]
        for number, path in enumerate(self.paths):
            os.truncate(path, self._stripes.share(number, self._capacity))
        self._memory = map_striped(self.paths, self._stripes, self._capacity)
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
        for number, file in enumerate(self._files):
            file.reserve(self._stripes.share(number, begin + length))
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

    def read(self, target: Tensor, begin: int, priority: Priority) -> list[Transfer]:
        """Begins to fill ``target`` from byte ``begin`` on; what arrives is compared with its checksums."""
        begun = [
            self._disk.read(
                self._files[span.file],
                target[span.begin - begin : span.end - begin],
                offset=span.offset,
                priority=priority,
                sums=self.sums_of(span.begin, span.end),
                verify=True,
            )
            for span in self._stripes.transfers(begin, begin + target.numel())
        ]
        self._note("read", begun)
        return begun

    def write(self, source: Tensor, begin: int, *, summed: bool) -> list[Transfer]:
        """Begins to write ``source`` from byte ``begin`` on, with new checksums if it is to be ``summed``."""
        begun = [
            self._disk.write(
                self._files[span.file],
                source[span.begin - begin : span.end - begin],
                offset=span.offset,
                priority=Priority.WRITE_BACK,
                sums=self.sums_of(span.begin, span.end) if summed else None,
            )
            for span in self._stripes.transfers(begin, begin + source.numel())
        ]
        self.writes += begun
        self._note("write", begun)
        return begun

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Blocks until transfers of this unit are done; raises what made one fail, with the unit's name."""
        failure = None
        for transfer in transfers:
            try:
                transfer.wait()
            except (DiskError, CorruptionError) as error:
                failure = failure or error
        if failure is not None:
            if not failure.message.startswith(self.name):
                failure.message = f"{self.name}: {failure.message}"
            raise failure

    def settled(self) -> bool:
        """Whether nothing is on its way into the file; raises what made a write fail."""
        done = [transfer for transfer in self.writes if transfer.done()]
        self.wait(done)
        self.writes = [transfer for transfer in self.writes if transfer not in done]
        return not self.writes

    def settle(self) -> None:
        """Blocks until what is on its way into the file has arrived; raises what made it fail."""
        self.wait(list(self.writes))

    def verify(self) -> None:
        """Reads all of it and compares the checksums. Raises CorruptionError."""
        target = HostBuffer(min(_VERIFIED_AT_ONCE, self.taken_bytes), private=True).flat
        for begin in range(0, self.taken_bytes, _VERIFIED_AT_ONCE):
            end = min(begin + _VERIFIED_AT_ONCE, self.taken_bytes)
            self.wait(self.read(target[: end - begin], begin, Priority.FETCH))

    def _note(self, what: str, transfers: Iterable[Transfer]) -> None:
        if (timeline := self._device.timeline) is not None:
            for transfer in transfers:
                timeline.add_later(f"disk {what}s", f"{what} {self.name}", transfer.times)

    def _open(self, path: Path) -> DiskFile:
        path.unlink(missing_ok=True)
        file = self._disk.open(path, create=True)
        if file.alignment > PAGE_BYTES:
            raise StoreError(
                f"a disk must take direct transfers in blocks of {PAGE_BYTES} bytes or fewer (that of {path} wants "
                f"{file.alignment}); use a directory on another file system"
            )
        return file
