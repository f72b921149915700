"""What a directory's disk sustains under the library's own transfers: reads, writes, and both as updates have them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stronghold.errors import DiskError, StoreError
from stronghold.layout import PAGE_BYTES
from stronghold.native import Disk, DiskFile, Priority, Transfer
from stronghold.planner.machine_file import BESIDE_COMPUTE
from stronghold.probing.beside import SmallLayer
from stronghold.probing.rounds import Key, Measure
from stronghold.probing.stopwatches import DeviceClock
from stronghold.units import format_bytes

CHUNK_BYTES = 16 * 2**20
"""What one transfer moves."""
BUFFERS = 4
FILE_CHUNKS, LEAST_CHUNKS = 24, 2
"""Of the scratch file, where there is room for them, and at least."""
SAMPLE_S = 0.25
MOST_TRANSFERS = 48


def check_directory(path: str | os.PathLike[str]) -> str:
    """Returns the real path of a directory that can be probed. Raises StoreError for one that cannot."""
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        reason = "which is a file" if os.path.exists(real) else "which does not exist"
        raise StoreError(
            f"a directory that is probed must be there (got {os.fspath(path)!r}, {reason}); make it, or pass another"
        )
    if not os.access(real, os.W_OK | os.X_OK):
        raise StoreError(
            f"a directory that is probed must be one that this user may write (got {os.fspath(path)!r}, which is not); "
            "grant the rights, or pass another"
        )
    free, least = shutil.disk_usage(real).free, LEAST_CHUNKS * CHUNK_BYTES
    if free < 2 * least:
        raise StoreError(
            f"a directory that is probed must have {format_bytes(2 * least)} free (got {format_bytes(free)} at "
            f"{os.fspath(path)!r}); free space there, or pass another"
        )
    return real


@contextmanager
def scratch_file(disk: Disk, directory: str) -> Iterator[tuple[DiskFile, int]]:
    """A file in ``directory`` and the chunks that it holds. It has no name once it is open: nothing can leave it there.

    Raises StoreError where it cannot be had.
    """
    chunks = min(FILE_CHUNKS, max(LEAST_CHUNKS, shutil.disk_usage(directory).free // 2 // CHUNK_BYTES))
    name = None
    try:
        handle, name = tempfile.mkstemp(prefix=".stronghold-probe-", dir=directory)
        os.close(handle)
        file = disk.open(name)
        os.unlink(name)
        name = None
        file.reserve(chunks * CHUNK_BYTES)
    except OSError as error:
        raise StoreError(
            f"a directory that is probed must take a file of {format_bytes(chunks * CHUNK_BYTES)} (got {error} at "
            f"{directory!r}); free space there, or pass another directory"
        ) from error
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
    yield file, chunks


class DiskSpeed:
    """Transfers of chunks in a scratch file, as many at once as the store has, with the checksums that it has."""

    def __init__(self, clock: DeviceClock, disk: Disk, file: DiskFile, chunks: int, directory: str) -> None:
        device = clock.device
        self._layer = SmallLayer(torch.float32, clock)
        self._disk, self._file, self._chunks, self._directory = disk, file, chunks, directory
        self._buffers = [device.host_buffer(CHUNK_BYTES, pinned=False, private=True).flat for _ in range(BUFFERS)]
        for buffer in self._buffers:
            buffer.view(torch.int64).random_()  # what can be compressed would be faster
        pages = CHUNK_BYTES // PAGE_BYTES
        self._sums = [torch.zeros(pages, dtype=torch.int32, device="cpu") for _ in range(chunks)]
        self._next = 0
        self._counts: dict[str, int] = {}
        self._fill()

    def measures(self) -> list[Measure]:
        what = f"the disk at {self._directory}"
        return [
            Measure(what, lambda: self._sample("read")),
            Measure(what, lambda: self._sample("write")),
            Measure(what, lambda: self._sample("both")),
            Measure(f"{what} beside computing", self._beside),
        ]

    def _fill(self) -> None:
        """Writes the file once: space that was reserved is written differently the first time."""
        self._write(self._chunks)

    def _sample(self, kind: str) -> Mapping[Key, float]:
        run = {"read": self._read, "write": self._write, "both": self._both}[kind]
        if kind not in self._counts:
            taken_s = run(BUFFERS) / BUFFERS
            self._counts[kind] = max(BUFFERS, min(MOST_TRANSFERS, round(SAMPLE_S / max(taken_s, 1e-6))))
        count = self._counts[kind]
        rate = count * CHUNK_BYTES / run(count)
        names = ("read_beside_write", "write_beside_read") if kind == "both" else (kind,)
        return {("disk", self._directory, name): rate for name in names}

    def _beside(self) -> Mapping[Key, float]:
        """How many times as long computing takes beside transfers, and transfers beside computing."""
        count = self._counts["both"]
        layer_s, alone_s = self._layer.timed(SAMPLE_S / 2), self._both(count)
        beside_s, taken_s = self._layer.timed_beside(lambda: self._both(count), SAMPLE_S)
        names = dict(zip(BESIDE_COMPUTE, (beside_s / layer_s, taken_s / alone_s), strict=True))
        return {("disk", self._directory, name): max(1.0, factor) for name, factor in names.items()}

    def _places(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the next chunks of the file, and a buffer for each."""
        for _ in range(count):
            yield self._next % self._chunks, self._next % BUFFERS
            self._next += 1

    def _read(self, count: int) -> float:
        return self._run(
            count,
            lambda chunk, buffer: self._disk.read(
                self._file,
                self._buffers[buffer],
                offset=chunk * CHUNK_BYTES,
                sums=self._sums[chunk],
                verify=True,
            ),
        )

    def _write(self, count: int) -> float:
        return self._run(count, self._begin_write)

    def _begin_write(self, chunk: int, buffer: int) -> Transfer:
        memory, sums = self._buffers[buffer], self._sums[chunk]
        return self._disk.write(self._file, memory, offset=chunk * CHUNK_BYTES, sums=sums)

    def _run(self, count: int, begin) -> float:
        """Returns the seconds of so many transfers, BUFFERS at a time."""
        begin_s, under_way = time.perf_counter(), dict[int, Transfer]()
        for chunk, buffer in self._places(count):
            if buffer in under_way:
                under_way.pop(buffer).wait()
            under_way[buffer] = begin(chunk, buffer)
        for transfer in under_way.values():
            transfer.wait()
        return time.perf_counter() - begin_s

    def _both(self, count: int) -> float:
        """Reads chunks and writes them back, as the ring of updates does: two are read while the one before is written.

        ``count`` chunks are read, and as many written.
        """
        begin_s = time.perf_counter()
        reads, writes = list[tuple[int, int, Transfer]](), dict[int, Transfer]()
        for chunk, buffer in self._places(count):
            if buffer in writes:
                writes.pop(buffer).wait()
            read = self._disk.read(
                self._file,
                self._buffers[buffer],
                offset=chunk * CHUNK_BYTES,
                priority=Priority.PREFETCH,
                sums=self._sums[chunk],
                verify=True,
            )
            reads.append((chunk, buffer, read))
            if len(reads) > 2:
                self._write_back(reads, writes)
        while reads:
            self._write_back(reads, writes)
        for transfer in writes.values():
            transfer.wait()
        return time.perf_counter() - begin_s

    def _write_back(self, reads: list[tuple[int, int, Transfer]], writes: dict[int, Transfer]) -> None:
        chunk, buffer, read = reads.pop(0)
        read.wait()
        writes[buffer] = self._begin_write(chunk, buffer)


@contextmanager
def disk_measures(clock: DeviceClock, directories: Sequence[str]) -> Iterator[list[Measure]]:
    """What is to be measured of the disks of ``directories``, real paths, whose scratch files go with the block.

    Raises StoreError, which names the directory.
    """
    measures: list[Measure] = []
    with contextlib.ExitStack() as stack:
        for directory in directories:
            disk = stack.enter_context(Disk())
            file, chunks = stack.enter_context(scratch_file(disk, directory))
            try:
                speed = DiskSpeed(clock, disk, file, chunks, directory)
            except DiskError as error:
                raise StoreError(
                    f"a directory that is probed must take {format_bytes(chunks * CHUNK_BYTES)} (got at {directory!r}: "
                    f"{error}); free space there, or pass another"
                ) from error
            measures += speed.measures()
        yield measures
