"""Where layers' inputs lie between the forward and the backward pass: in host memory, or behind staging on disk."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from stronghold.device import Device, Event, HostBuffer, Stream, Wait, Waits
from stronghold.layout import ALIGNMENT_BYTES, PAGE_BYTES, Layout, lay_out, round_up
from stronghold.store import INPUT_STAGING as STAGING
from stronghold.store import Extent, Store

AHEAD = STAGING - 1
"""Runs whose inputs are wanted next: one is copied up, the other read."""


class Inputs:
    """The inputs of one run of ``layer``, which come up together; they live as long as autograd keeps one of them."""

    def __init__(self, layer: str, layout: Layout) -> None:
        self.layer, self.layout = layer, layout
        self.kept = 0
        """How many have gone down."""


class Shelf(ABC):
    """Host memory into which a run's inputs are copied down, and from which they are copied up again."""

    alignment = ALIGNMENT_BYTES
    on_disk = False

    def __init__(self, device: Device, waits: Waits, store: Store) -> None:
        self.device, self.waits, self.store = device, waits, store

    def layout(self, sizes: Sequence[int]) -> Layout:
        """Returns how a run's inputs of these bytes lie together."""
        return lay_out(sizes, self.alignment)

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """What it takes of host memory."""

    @property
    def disk_bytes(self) -> int:
        """What it takes of the store's disks."""
        return 0

    @property
    def streams(self) -> list[Stream]:
        """Its own."""
        return []

    @abstractmethod
    def room(self, inputs: Inputs) -> Tensor:
        """Returns the memory that the inputs are to be copied to, on ``gradients``; the same for all of a run.

        Raises BudgetError, MemoryError, StoreError and DiskError where there is none.
        """

    @abstractmethod
    def arrived(self, inputs: Inputs, begin: int, length_bytes: int, down: Event) -> None:
        """Called when the copy of an input there was submitted, which has ended at ``down``."""

    @abstractmethod
    def source(self, inputs: Inputs) -> tuple[Tensor, Event]:
        """Returns the memory to copy them up from, and when they are there."""

    @abstractmethod
    def copied_up(self, inputs: Inputs, up: Event) -> None:
        """Called when the copy up was submitted, which has ended at ``up``."""

    @abstractmethod
    def expect(self, runs: Sequence[Inputs]) -> None:
        """Called with the runs that the backward pass comes to next, in its order."""


class _InputBuffer:
    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer
        self.used: Event | None = None
        """When the last copy from it or to it has ended."""


class HostShelf(Shelf):
    """Keeps each run's inputs in a buffer of their own. Buffers are used again, from step to step."""

    def __init__(self, device: Device, waits: Waits, store: Store) -> None:
        super().__init__(device, waits, store)
        self._places: weakref.WeakKeyDictionary[Inputs, _InputBuffer] = weakref.WeakKeyDictionary()
        self._pool: list[_InputBuffer] = []
        self._alive: weakref.WeakSet[_InputBuffer] = weakref.WeakSet()

    @property
    def host_bytes(self) -> int:
        return sum(place.buffer.length_bytes for place in self._alive)

    def room(self, inputs: Inputs) -> Tensor:
        if inputs not in self._places:
            self._places[inputs] = place = self._take(inputs)
            weakref.finalize(inputs, self._pool.append, place).atexit = False
        return self._places[inputs].buffer.flat

    def arrived(self, inputs: Inputs, begin: int, length_bytes: int, down: Event) -> None:
        self._places[inputs].used = down

    def source(self, inputs: Inputs) -> tuple[Tensor, Event]:
        place = self._places[inputs]
        assert place.used is not None
        return place.buffer.flat, place.used

    def copied_up(self, inputs: Inputs, up: Event) -> None:
        self._places[inputs].used = up

    def expect(self, runs: Sequence[Inputs]) -> None:
        pass  # they are there

    def _take(self, inputs: Inputs) -> _InputBuffer:
        # What may still be on its way up from a buffer in the pool, nobody waits for any more.
        length = inputs.layout.total_bytes
        fitting = [place for place in self._pool if place.buffer.length_bytes >= length]
        if fitting:
            place = min(fitting, key=lambda place: place.buffer.length_bytes)
            self._pool.remove(place)
            return place
        # Those that batches have outgrown make room.
        self._pool[:] = [place for place in self._pool if place.used is not None and not place.used.done]
        self.store.check_inputs(host_bytes=length, what=f"the inputs of {inputs.layer} in activations='host'")
        place = _InputBuffer(self.device.host_buffer(length, private=True))
        self._alive.add(place)
        return place


class _InputStaging:
    def __init__(self) -> None:
        self.host: HostBuffer | None = None
        self.inputs: weakref.ref[Inputs] | None = None
        """Whose it holds."""
        self.there: Event | None = None
        """When they are in it."""
        self.in_use: list[Event] = []
        """When it has been read and filled: by a copy up, and by the disk."""

    @property
    def flat(self) -> Tensor:
        assert self.host is not None
        return self.host.flat

    def holds(self, inputs: Inputs) -> bool:
        return self.inputs is not None and self.inputs() is inputs


class DiskShelf(Shelf):
    """Keeps them in the store's file, on a stream of their own; ``STAGING`` buffers on the host hold the newest runs'.

    Those are copied up from there, so that the backward pass begins without a read; meanwhile the ones before are read,
    a run before their copy up. Nothing waits in a circle: a write waits for a copy down, a copy down and a read for the
    buffer's write, or copy up, a copy up for a read, and all of these were submitted earlier.
    """

    alignment = PAGE_BYTES
    on_disk = True

    def __init__(self, device: Device, waits: Waits, store: Store) -> None:
        super().__init__(device, waits, store)
        self._file = store.input_file()
        self._stream = device.host_stream("inputs")
        self._extents: weakref.WeakKeyDictionary[Inputs, Extent] = weakref.WeakKeyDictionary()
        self._buffers = [_InputStaging() for _ in range(STAGING)]
        """The one that was filled last is the last."""
        self._outgrown: list[tuple[HostBuffer, list[Event]]] = []

    @property
    def host_bytes(self) -> int:
        held = [buffer.host for buffer in self._buffers if buffer.host is not None]
        return sum(host.length_bytes for host in [*held, *(host for host, _ in self._outgrown)])

    @property
    def disk_bytes(self) -> int:
        return self._file.disk_bytes

    @property
    def streams(self) -> list[Stream]:
        return [self._stream]

    def room(self, inputs: Inputs) -> Tensor:
        if inputs not in self._extents:
            extent = self._file.take(f"the inputs of {inputs.layer}", inputs.layout.total_bytes)
            self._extents[inputs] = extent
            weakref.finalize(inputs, self._file.give_back, extent).atexit = False
            self._fill(inputs, self.device.gradients, [inputs])
        return self._holding(inputs).flat

    def arrived(self, inputs: Inputs, begin: int, length_bytes: int, down: Event) -> None:
        buffer, extent, file = self._holding(inputs), self._extents[inputs], self._file
        pages = buffer.flat[begin : begin + round_up(length_bytes, PAGE_BYTES)]
        # The disk is given the staging's bytes: their copy down must be complete.
        self.waits.stream(self._stream, down, Wait.INPUT_STAGED)
        self._stream.run(lambda: file.write(extent, begin, pages), moved_bytes=length_bytes)
        buffer.there, buffer.in_use = down, [self._stream.record()]

    def source(self, inputs: Inputs) -> tuple[Tensor, Event]:
        self._read(inputs, [inputs])
        buffer = self._holding(inputs)
        assert buffer.there is not None
        return buffer.flat, buffer.there

    def copied_up(self, inputs: Inputs, up: Event) -> None:
        self._holding(inputs).in_use.append(up)

    def expect(self, runs: Sequence[Inputs]) -> None:
        for inputs in runs[:AHEAD]:
            self._read(inputs, runs[:AHEAD])

    def _read(self, inputs: Inputs, wanted: Sequence[Inputs]) -> None:
        """Begins to read what is in no buffer, into one that holds none of those ``wanted``."""
        if any(buffer.holds(inputs) for buffer in self._buffers):
            return
        buffer, extent, file = self._fill(inputs, self._stream, wanted), self._extents[inputs], self._file
        target = buffer.flat[: extent.length_bytes]
        self._stream.run(lambda: file.read(extent, target), moved_bytes=extent.length_bytes)
        buffer.there = self._stream.record()
        buffer.in_use = [buffer.there]

    def _holding(self, inputs: Inputs) -> _InputStaging:
        return next(buffer for buffer in self._buffers if buffer.holds(inputs))

    def _fill(self, inputs: Inputs, stream: Stream, wanted: Sequence[Inputs]) -> _InputStaging:
        """Returns a buffer that holds none of those ``wanted``, for ``stream`` to fill."""
        length = round_up(inputs.layout.total_bytes, PAGE_BYTES)
        buffer = next(one for one in self._buffers if not any(one.holds(other) for other in wanted))
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        buffer.inputs = None  # should there be no memory for another
        if buffer.host is None or buffer.host.length_bytes < length:
            if buffer.host is not None:
                self._outgrown.append((buffer.host, buffer.in_use))
            self._outgrown = [one for one in self._outgrown if not all(event.done for event in one[1])]
            buffer.host, buffer.in_use = None, []
            self.store.check_inputs(host_bytes=length, what="staging for layers' inputs in activations='disk'")
            buffer.host = self.device.host_buffer(length, private=True)
        for event in buffer.in_use:
            # The disk may still be given the inputs before, or a copy up read them.
            self.waits.thread(stream, event, Wait.INPUT_STAGING_FREE)
        buffer.inputs = weakref.ref(inputs)
        return buffer
