"""Staging: pinned buffers that layers pass on their way from disk to a device with memory of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stronghold.device import Device, Event, HostBuffer, Stream, Wait, Waits
from stronghold.native import Priority
from stronghold.unit import Unit

AHEAD = 2
"""Layers that are read before their fetch."""
BUFFERS = AHEAD + 1
"""One more is copied from meanwhile, or filled by a fetch that nobody has foreseen."""

Read = Callable[[Stream, Unit, Tensor, Priority], Event]
"""Reads a layer in the order of a stream; the event happens when it is there."""


def staging_bytes(units: Iterable[Unit], device: Device) -> int:
    """Returns what staging takes of host memory: nothing where no weights are on disk, or slots are host memory."""
    if device.is_host:
        return 0
    return BUFFERS * max((unit.slot_bytes for unit in units if unit.lives("weights") == "disk"), default=0)


@dataclass(eq=False)
class _Buffer:
    host: HostBuffer
    free: tuple[Event, ...] = ()
    """Behind these nobody reads into it or copies from it any more."""


class DiskStaging:
    """``BUFFERS`` buffers, filled by a fetch or, ``AHEAD`` layers before it, by a stream of their own.

    Nothing here waits in a circle, for everything waits for what was issued before it: a read ahead for an update and
    for the copy of a fetch, a fetch for its read, for an update and for computations, an update for reads of its file
    and for gradients, which were all issued earlier. What updates wait for in the ring are transfers, which wait for
    nothing.

    Nor does anything that the computation waits for stand behind what can wait: a read ahead goes before the ring's
    and behind what a fetch reads itself. A fetch that waits for a read ahead need not raise it: as long as it waits, no
    other fetch reads, and the reads ahead go one by one in the order of the fetches.
    """

    def __init__(self, device: Device, waits: Waits, read: Read, length_bytes: int) -> None:
        self.device = device
        self.waits = waits
        self._read = read
        self._all = [_Buffer(device.host_buffer(length_bytes // BUFFERS, private=True)) for _ in range(BUFFERS)]
        self._free = deque(self._all)
        self._ahead: dict[Unit, tuple[_Buffer, Event]] = {}
        """What is there or on its way, and when it has been read."""

    def expect(self, units: Sequence[Unit]) -> None:
        """Begins to read the layers of the next fetches, and gives up what is not among them."""
        assert len(units) <= AHEAD
        for unit in set(self._ahead).difference(units):
            self.drop(unit)
        for unit in units:
            if unit not in self._ahead:
                buffer = self._take(self.device.reads)
                # The layer may be in line for its update, or what that wrote on its way to the file.
                self.waits.stream(self.device.reads, unit.updated, Wait.UPDATE_WRITTEN_BACK)
                read = self._read(self.device.reads, unit, buffer.host.flat, Priority.READ_AHEAD)
                self._ahead[unit] = buffer, read

    def drop(self, unit: Unit) -> None:
        """Gives up what was read of a layer that is changing."""
        if unit in self._ahead:
            buffer, read = self._ahead.pop(unit)
            buffer.free = (read,)
            self._free.append(buffer)

    def start_over(self) -> None:
        """Gives up all that was read; each buffer is free when both streams are done with what they were given."""
        free = self.device.reads.record(), self.device.fetches.record()
        for buffer in self._all:
            buffer.free = free
        self._ahead, self._free = {}, deque(self._all)

    def fetch(self, unit: Unit, target: Tensor) -> None:
        """Submits the copy of a layer to the device: of what was read ahead, or what it reads itself."""
        fetches, length = self.device.fetches, unit.layout.total_bytes
        if unit in self._ahead:
            buffer, read = self._ahead.pop(unit)
            # The copy reads the buffer: the layer must be there.
            self.waits.stream(fetches, read, Wait.READ_AHEAD)
        else:
            buffer = self._take(fetches)
            self._read(fetches, unit, buffer.host.flat, Priority.FETCH)
        fetches.copy(target[:length], buffer.host.flat[:length])
        buffer.free = (fetches.record(),)
        self._free.append(buffer)

    def _take(self, stream: Stream) -> _Buffer:
        buffer = self._free.popleft()
        # A copy to the device may still read it, or a read that was given up fill it; the host is to fill it now.
        for event in buffer.free:
            self.waits.thread(stream, event, Wait.BUFFER_FREE)
        return buffer
