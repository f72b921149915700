"""A file without a name, over the store's drives, in which layers' inputs wait for the backward pass."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stronghold.device import Device
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.formats.stripes import Stripes
from stronghold.layout import PAGE_BYTES, round_up
from stronghold.native import PIECE_BYTES, Disk, DiskFile, Priority, Transfer
from stronghold.store.directory import check_free
from stronghold.store.extents import Extents

INPUT_STAGING = 3
"""Runs of layers whose inputs are in host memory on their way: one is written, or copied up, and two are next."""
_NAME = "inputs-{process}.bin"


class Extent:
    """Bytes of the file for what has this ``name``, whole pages, with a checksum of each: 0 until it was written."""

    def __init__(self, name: str, begin: int, length_bytes: int) -> None:
        self.name, self.begin, self.length_bytes = name, begin, length_bytes
        self.sums = torch.zeros(length_bytes // PAGE_BYTES, dtype=torch.int32, device="cpu")


class InputFile:
    """Extents in a file on each drive, stripe by stripe, as long as what is taken of it.

    The files lose their names as soon as they are open: however the process ends, the system takes their space back.
    ``write`` and ``read`` block until the disk is done, and are called by one thread: then nobody reads or writes an
    extent that was given back while its last transfer is under way.

    Raises DiskError where the system refuses, StoreError for a device with blocks larger than a page.
    """

    def __init__(self, disk: Disk, device: Device, paths: Sequence[Path]) -> None:
        self._disk, self._device, self._paths = disk, device, paths
        self._stripes = Stripes(len(paths), PIECE_BYTES)
        self._files: list[DiskFile] = []
        self._extents = Extents()
        self._given_back: deque[Extent] = deque()
        """Put there by whatever thread lets go of an extent last."""
        self._reserved_bytes = 0
        for path in paths:
            file = path / _NAME.format(process=os.getpid())
            with contextlib.suppress(FileNotFoundError):  # of a process that ended between these two lines
                file.unlink()
            self._files.append(disk.open(file, create=True))
            file.unlink()
            if self._files[-1].alignment > PAGE_BYTES:
                raise StoreError(
                    f"a disk must take direct transfers in blocks of {PAGE_BYTES} bytes or fewer (that of {path} wants "
                    f"{self._files[-1].alignment}); use a directory on another file system"
                )

    @property
    def disk_bytes(self) -> int:
        """What the files take."""
        return self._reserved_bytes

    def take(self, name: str, length_bytes: int) -> Extent:
        """Returns an extent of ``length_bytes``, in whole pages, for what has this name.

        Raises StoreError or DiskError where the disk has not so much left.
        """
        while self._given_back:
            extent = self._given_back.popleft()
            self._extents.give_back(extent.begin, extent.length_bytes)
        length = round_up(length_bytes, PAGE_BYTES)
        end = self._extents.place_of(length) + length
        if end > self._reserved_bytes:
            check_free(self._paths, end - self._reserved_bytes, name)
            for number, file in enumerate(self._files):
                file.reserve(self._stripes.share(number, end))
            self._reserved_bytes = end
        return Extent(name, self._extents.take(length), length)

    def give_back(self, extent: Extent) -> None:
        """Lets go of an extent; called from any thread."""
        self._given_back.append(extent)

    def write(self, extent: Extent, begin: int, source: Tensor) -> None:
        """Writes ``source``, whole pages of the host's memory, from byte ``begin`` of the extent on, a page's first."""
        self._wait("write", extent, self._submit(extent, begin, source, is_write=True))

    def read(self, extent: Extent, target: Tensor) -> None:
        """Fills ``target``, whole pages, from the extent. Raises CorruptionError for what is not what was written."""
        self._wait("read", extent, self._submit(extent, 0, target, is_write=False))

    def close(self) -> None:
        """Gives the space back, once the last transfer has ended."""
        self._files.clear()

    def _submit(self, extent: Extent, begin: int, memory: Tensor, *, is_write: bool) -> list[Transfer]:
        first, transfers = extent.begin + begin, []
        for span in self._stripes.transfers(first, first + memory.numel(), PIECE_BYTES):
            part = memory[span.begin - first : span.end - first]
            sums = extent.sums[(span.begin - extent.begin) // PAGE_BYTES : (span.end - extent.begin) // PAGE_BYTES]
            file = self._files[span.file]
            transfers.append(
                self._disk.write(file, part, offset=span.offset, priority=Priority.PREFETCH, sums=sums)
                if is_write
                else self._disk.read(
                    file, part, offset=span.offset, priority=Priority.READ_AHEAD, sums=sums, verify=True
                )
            )
        return transfers

    def _wait(self, what: str, extent: Extent, transfers: list[Transfer]) -> None:
        failure: DiskError | CorruptionError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except (DiskError, CorruptionError) as error:  # memory is in use until the last one has ended
                failure = failure or error
        if failure is not None:
            failure.message = f"{extent.name}: {failure.message}"
            raise failure
        if (timeline := self._device.timeline) is not None:
            for transfer in transfers:
                timeline.add_later(f"disk {what}s", f"{what} {extent.name}", transfer.times)
