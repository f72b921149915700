"""The ring: buffers in RAM through which units on disk pass chunk by chunk to be updated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from stronghold.device import Buffer, Device, Stream, over
from stronghold.layout import PAGE_BYTES, Part, round_up
from stronghold.native import BLOCK, Priority, Transfer
from stronghold.store.chunks import Array, chunks, spans
from stronghold.store.store import Kernel, Piece
from stronghold.store.unit_file import UnitFile

SLOTS = 4
"""One is read, one updated, one written, and one is ready to be updated next."""
SLOT_BYTES = 24 * 2**20
"""The most that a slot has: as much as the longest update, where that is less."""


def slot_bytes(update_bytes: int) -> int:
    """Returns what a slot must have for an update that reads and writes ``update_bytes`` on disk."""
    return min(SLOT_BYTES, round_up(update_bytes, PAGE_BYTES))


@dataclass
class _RingSlot:
    buffer: Buffer
    chunk: Chunk | None = None
    written: UnitFile | None = None
    """Whose chunk was here before."""
    writes: list[Transfer] = field(default_factory=list)
    """Those of it that are under way; its reads where it was given up."""

    def drain(self) -> None:
        """Blocks until the chunk before is written: until then the buffer is read."""
        if self.written is not None:
            self.written.wait(self.writes)
        self.writes = []


@dataclass(eq=False)
class Chunk:
    """Parts of one unit that are in memory together. ``runs`` are (begin in the file, end there, begin in memory)."""

    file: UnitFile
    update: object
    """The same for all chunks of one update; the chunks of one unit's updates take turns."""
    first: bool
    is_aliased: Callable[[], bool]
    """Whether the user may write the unit without our knowing: what is written back then gets no checksums."""
    parts: list[Part]
    runs: list[tuple[int, int, int]]
    slot: _RingSlot | None = None
    reads: list[Transfer] = field(default_factory=list)

    def twin(self, tensor: Tensor) -> Tensor:
        """Returns what holds the values of a tensor of the file while the chunk is in memory."""
        offset = self.file.find(tensor)
        if offset is None or not tensor.numel():
            return tensor
        assert self.slot is not None
        begin = next(there + offset - first for first, end, there in self.runs if first <= offset < end)
        return self.slot.buffer.flat[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype)


class Ring:
    """``SLOTS`` buffers. Chunks are read in the order in which they were added, as far ahead as buffers are free.

    Each has as much as the longest update needs that :meth:`hold` was called for.

    Chunks are added by the thread that computes; taken and given back, in the same order, by the one that updates. The
    thread of ``ahead`` begins to read them, for the one that updates may be at another update, and signals, which a
    read must not be interrupted by, come to the one that computes.
    """

    def __init__(self, device: Device, ahead: Stream) -> None:
        self._device = device
        self._ahead = ahead
        self.slot_bytes = 0
        self._slots = [_RingSlot(self._buffer()) for _ in range(SLOTS)]
        self._waiting: deque[Chunk] = deque()
        self._lock = threading.Lock()

    def missing_bytes(self, update_bytes: int) -> int:
        """Returns how much longer the ring must become for an update of ``update_bytes``."""
        return SLOTS * max(0, slot_bytes(update_bytes) - self.slot_bytes)

    def hold(self, update_bytes: int) -> None:
        """Makes slots as long as an update of ``update_bytes`` needs: those that are in use when they are free."""
        if not self.missing_bytes(update_bytes):
            return
        with self._lock:
            before, self.slot_bytes = self.slot_bytes, max(self.slot_bytes, slot_bytes(update_bytes))
            try:
                for slot in self._slots:
                    if slot.chunk is None:
                        slot.drain()
                        self._lengthen(slot)
            except BaseException:
                self.slot_bytes = before  # what is longer by now does for what is shorter
                raise

    def _lengthen(self, slot: _RingSlot) -> None:
        if slot.buffer.flat.numel() < self.slot_bytes:
            slot.buffer = self._buffer()

    def _buffer(self) -> Buffer:
        return self._device.host_buffer(self.slot_bytes, pinned=False, private=True)

    def add(self, waiting: Sequence[Chunk]) -> None:
        """Has ``waiting`` read, behind all that were added before."""
        self._waiting.extend(waiting)  # in one go, without the lock: who holds that may be waiting for the disk
        self._ahead.submit(self._begin_to_read)

    def _begin_to_read(self) -> None:
        with self._lock, suppress(Exception):  # to take the chunk meets the same
            self._read_ahead()

    def take(self, chunk: Chunk) -> None:
        """Blocks until ``chunk`` is in memory; the next ones are read meanwhile."""
        with self._lock:
            self._read_ahead(until=chunk)
        chunk.file.wait(chunk.reads)

    def give(self, chunk: Chunk) -> None:
        """Begins to write ``chunk`` back and gives its buffer to one that waits."""
        with self._lock:
            file, slot = chunk.file, chunk.slot
            assert slot is not None
            slot.written = file
            summed = not chunk.is_aliased()
            slot.writes = [
                transfer
                for begin, end, there in chunk.runs
                for transfer in file.write(slot.buffer.flat[there : there + end - begin], begin, summed=summed)
            ]
            self._release(chunk)

    def cancel(self, given_up: Sequence[Chunk]) -> None:
        """Gives back those chunks that were added, and have not been updated."""
        with self._lock:
            for chunk in given_up:
                if chunk in self._waiting:
                    self._waiting.remove(chunk)
                elif chunk.slot is not None:
                    chunk.file.wait(chunk.reads)
                    chunk.slot.written, chunk.slot.writes = chunk.file, chunk.reads  # which the next one waits for, too
                    self._release(chunk)
            self._read_ahead()

    def _release(self, chunk: Chunk) -> None:
        slot, chunk.slot = chunk.slot, None
        assert slot is not None
        slot.chunk = None
        self._read_ahead()

    def _read_ahead(self, until: Chunk | None = None) -> None:
        """Begins to read chunks that wait, without blocking; but blocks for ``until``."""
        while self._waiting and (until is None or until.slot is None or self._free() is not None):
            chunk, block = self._waiting[0], until is not None and until.slot is None
            if not self._begin(chunk, block=block):
                return
            self._waiting.popleft()

    def _begin(self, chunk: Chunk, *, block: bool) -> bool:
        file = chunk.file
        if any(other.chunk is not None and self._before(other.chunk, chunk) for other in self._slots):
            assert not block, "an update was taken before the one ahead of it on the same unit"
            return False  # it will read what that one is about to write
        slot = self._free() or (self._draining() if block else None)
        if slot is None:
            return False
        if chunk.first and not file.settled():
            if not block:
                return False
            file.settle()
        slot.drain()
        self._lengthen(slot)
        slot.chunk, chunk.slot = chunk, slot
        chunk.reads = [
            transfer
            for begin, end, there in chunk.runs
            for transfer in file.read(slot.buffer.flat[there : there + end - begin], begin, Priority.PREFETCH)
        ]
        return True

    @staticmethod
    def _before(earlier: Chunk, chunk: Chunk) -> bool:
        return earlier.update is not chunk.update and earlier.file is chunk.file

    def _free(self) -> _RingSlot | None:
        idle = (slot for slot in self._slots if slot.chunk is None)
        return next((slot for slot in idle if all(transfer.done() for transfer in slot.writes)), None)

    def _draining(self) -> _RingSlot | None:
        return next((slot for slot in self._slots if slot.chunk is None), None)


class DiskUpdateIO:
    """One unit's way from disk through the ring and back."""

    def __init__(
        self,
        ring: Ring,
        file: UnitFile,
        operands: Sequence[Sequence[Tensor]],
        parts: Sequence[Part],
        is_aliased: Callable[[], bool],
        before: Callable[[], object],
    ) -> None:
        self.ring = ring
        self.file = file
        self.is_aliased = is_aliased
        self._before = before
        """Called before a byte changes: an update that is refused, or cancelled, changes none."""
        file.check_versions([tensor for tensors in operands for tensor in tensors])
        elements = [tensors[0].numel() for tensors in operands]
        arrays = [
            [
                Array(offset, tensor.element_size(), 1 if tensor.numel() == count else BLOCK)
                for tensor in tensors
                if count and (offset := file.find(tensor)) is not None
            ]
            for tensors, count in zip(operands, elements, strict=True)
        ]
        update = object()
        self.chunks = [
            Chunk(file, update, not number, is_aliased, one, _packed(spans(one, arrays)))
            for number, one in enumerate(chunks(parts, arrays, ring.slot_bytes))
        ]

    def begin(self) -> None:
        self.ring.add(self.chunks)

    def run(self, segments: Sequence[Piece], kernel: Kernel) -> None:
        self._before()
        for chunk in self.chunks:
            self.ring.take(chunk)
            kernel([segments[p.number].mapped(over).part(p.begin, p.end).mapped(chunk.twin) for p in chunk.parts])
            self.ring.give(chunk)
        if self.is_aliased():
            self.file.settle()  # the weights are looked at next, through the mapping, to tell later writes from these

    def cancel(self) -> None:
        self.ring.cancel(self.chunks)


def _packed(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    packed, there = [], 0
    for begin, end in runs:
        packed.append((begin, end, there))
        there += end - begin
    return packed
