"""The disk in a played step: what is read before a fetch, and the ring that updates pass through."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from stronghold.planner.program import Kind, Program
from stronghold.planner.step_costs import Resource

RING_SLOTS = 4
"""Buffers that chunks of updates pass through: ``SLOTS`` of ``store/ring.py``."""
CHUNK_BYTES = 24 * 2**20
"""The most that a chunk has: ``SLOT_BYTES`` there."""
FETCH, READ_AHEAD, PREFETCH, WRITE_BACK = range(4)
"""What goes first on the disk, as in ``native/disk_io.py``."""
_WHOLE = {Kind.READ: READ_AHEAD, Kind.INPUTS_READ: READ_AHEAD, Kind.INPUTS_WRITE: PREFETCH}
"""Operations that are one transfer, and end with it, and how urgent they are on a stream of their own."""


@dataclass(eq=False)
class Job:
    """One transfer of ``unit`` for the operation ``here``: ``left_s`` seconds of work; the lower ``priority`` first."""

    here: int
    unit: int
    priority: int
    is_write: bool
    left_s: float
    done: bool = False
    began_s: float = -1.0
    ended_s: float = 0.0


@dataclass(eq=False)
class _WrittenSlot:
    chunk: _Chunk | None = None
    write: Job | None = None

    @property
    def is_drained(self) -> bool:
        return self.write is None or self.write.done


@dataclass(eq=False)
class _Chunk:
    """One part of a unit's update. ``unit`` and ``update`` tell chunks of the same unit's other updates apart."""

    here: int
    unit: int
    update: int
    slot: _WrittenSlot | None = None
    read: Job | None = None
    is_awaited: bool = False
    """Whether the thread that updates waits for it."""


class DiskPlay:
    """Says when operations that need the disk may begin, and what the disk works on.

    The disk carries out one job at a time, the most urgent first: its threads take the pieces of a transfer in order,
    and a transfer that is more urgent takes over at the next piece. The ring is that of ``store/ring.py``, step by
    step: chunks are read in order while one of its slots is free and drained, looked for when an update is prepared and
    when a chunk is taken or given back; only a chunk that the update waits for waits for a slot to drain.
    """

    def __init__(self, program: Program, read_s: Mapping[int, float], write_s: Mapping[int, float]) -> None:
        """``read_s`` and ``write_s`` are what operations read before themselves and write behind, by their number."""
        operations = program.operations
        self._operations, self._read_s, self._write_s = operations, read_s, write_s
        self.asked = program.on_disk
        """The operations that this is to be asked about before they begin."""
        self.let_go: set[int] = set()
        """Those that the disk has held up and does not any more."""
        self.jobs: list[Job] = []
        self._queue: list[tuple[int, int, Job]] = []
        self._released: list[int] = []
        self._slots = [_WrittenSlot() for _ in range(RING_SLOTS)]
        self._waiting: deque[_Chunk] = deque()
        self._chunks: dict[int, _Chunk] = {}
        self._blocked: _Chunk | None = None
        self._chosen: _WrittenSlot | None = None
        """The chunk that is waited for before it has a slot, and the slot that it waits for."""
        self._writes: dict[int, list[Job]] = {}
        """By unit, of its newest update."""
        self._settling: dict[int, int] = {}
        self._prepared = program.prepared

    def released(self) -> list[int]:
        """Returns the operations that may begin now and could not before."""
        released, self._released = self._released, []
        return released

    def head(self) -> Job | None:
        """Returns what the disk works on now."""
        return self._queue[0][2] if self._queue else None

    def may_begin(self, here: int) -> bool:
        """Called when nothing but the disk holds an operation up; if it does, ``released`` tells of its end."""
        operation = self._operations[here]
        if operation.kind in _WHOLE:
            priority = FETCH if operation.resource is Resource.FETCHES else _WHOLE[operation.kind]
            is_write = operation.kind is Kind.INPUTS_WRITE
            self._submit(here, priority, (self._write_s if is_write else self._read_s)[here], is_write=is_write)
            return False
        if operation.kind is Kind.PREPARE:
            for part in self._prepared[here]:
                chunk = self._chunks[part] = _Chunk(part, operation.number, here)
                self._waiting.append(chunk)
            self._read_ahead()
            return True
        if operation.kind is Kind.SETTLE:
            if self._settled(operation.number):
                return True
            self._settling[operation.number] = here
            return False
        chunk = self._chunks[here]
        chunk.is_awaited = True
        self._take(chunk)
        return self._is_there(chunk)

    def ended(self, here: int) -> None:
        """Called when an operation has ended that was asked about: a chunk that was updated is written back."""
        if (chunk := self._chunks.pop(here, None)) is None:
            return
        slot = chunk.slot
        assert slot is not None
        slot.write = self._submit(here, WRITE_BACK, self._write_s[here], is_write=True)
        self._writes.setdefault(chunk.unit, []).append(slot.write)
        slot.chunk = chunk.slot = None
        self._read_ahead()

    def finished(self, job: Job, now_s: float) -> None:
        """Called when the disk has done a job."""
        assert heapq.heappop(self._queue)[2] is job
        job.done, job.ended_s = True, now_s
        operation = self._operations[job.here]
        if operation.kind in _WHOLE:
            self._release(job.here)
        elif job.is_write:
            unit = operation.number
            if unit in self._settling and self._settled(unit):
                self._release(self._settling.pop(unit))
        if (chunk := self._blocked) is not None:
            self._take(chunk)
        for slot in self._slots:
            if slot.chunk is not None and slot.chunk.read is job and slot.chunk.is_awaited:
                self._release(slot.chunk.here)

    def _release(self, here: int) -> None:
        self.let_go.add(here)
        self._released.append(here)

    def _submit(self, here: int, priority: int, work_s: float, *, is_write: bool = False) -> Job:
        job = Job(here, self._operations[here].number, priority, is_write, work_s)
        heapq.heappush(self._queue, (priority, len(self.jobs), job))
        self.jobs.append(job)
        return job

    def _settled(self, unit: int) -> bool:
        writes = self._writes.get(unit, [])
        writes[:] = [write for write in writes if not write.done]
        return not writes

    # As in ring.py.

    def _is_there(self, chunk: _Chunk) -> bool:
        return chunk.read is not None and chunk.read.done

    def _take(self, chunk: _Chunk) -> None:
        self._read_ahead(until=chunk)
        self._blocked = chunk if chunk.slot is None else None

    def _read_ahead(self, until: _Chunk | None = None) -> None:
        """Begins to read what waits. ``until`` waits for a slot where none is free, and is tried when a job ends."""
        while self._waiting and (until is None or until.slot is None or self._free() is not None):
            if not self._begin(self._waiting[0], block=until is not None and until.slot is None):
                return
            self._waiting.popleft()

    def _begin(self, chunk: _Chunk, *, block: bool) -> bool:
        others = (slot.chunk for slot in self._slots if slot.chunk is not None)
        if any(other.unit == chunk.unit and other.update != chunk.update for other in others):
            return False
        slot = self._chosen or self._free()
        if slot is None and block:
            # The first one, though another may be drained before: as the ring does.
            slot = self._chosen = next(slot for slot in self._slots if slot.chunk is None)
        is_first = self._operations[chunk.here].part == 0
        if slot is None or not slot.is_drained or (is_first and not self._settled(chunk.unit)):
            return False
        slot.chunk, chunk.slot, self._chosen = chunk, slot, None
        chunk.read = self._submit(chunk.here, PREFETCH, self._read_s[chunk.here])
        return True

    def _free(self) -> _WrittenSlot | None:
        return next((slot for slot in self._slots if slot.chunk is None and slot.is_drained), None)
