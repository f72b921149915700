"""What the computation and each stream of a device did when, recorded while a trace is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stronghold.device.events import Event
from stronghold.spans import Span

if TYPE_CHECKING:
    from stronghold.device.device import Device
    from stronghold.device.streams import Stream


class Stamp:
    """A time in a stream's work, known once the stream has come there."""

    __slots__ = ("_known", "_time")

    def __init__(self) -> None:
        self._known = Event()
        self._time: object = None

    def put(self, time: object) -> None:
        self._time = time
        self._known.happen()

    def fail(self, error: BaseException) -> None:
        self._known.fail(error)

    def get(self) -> object:
        """Blocks until the stream has come there, and returns what its device's ``seconds`` takes.

        Raises what made the stream unable to tell.
        """
        self._known.wait()
        return self._time


class Timeline:
    """Spans of work: those of a device's streams and of its computation, and whatever else has a clock of the host.

    Times are kept as the device has them and become seconds in :meth:`spans`, so that recording waits for nothing.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._origin, self._host_origin_s = device.origin()
        self._found: list[tuple[str, str, Callable[[], tuple[object, object]]]] = []

    def add(self, lane: str, name: str, begin: object, end: object) -> None:
        """Notes what was done between two stamps of the computation, or two times of the host's clock."""
        self._found.append((lane, name, lambda: (begin, end)))

    def add_later(self, lane: str, name: str, times: Callable[[], tuple[object, object]]) -> None:
        """Notes what ``times`` will tell the times of once it is over; an end of 0 is of what never began."""
        self._found.append((lane, name, times))

    @contextmanager
    def on(self, stream: Stream, name: str) -> Iterator[None]:
        """Notes, as ``name``, the work that the block gives to ``stream``."""
        begin = stream.stamp()
        yield
        self.add(stream.name, name, begin, stream.stamp())

    def spans(self) -> list[Span]:
        """Returns what was recorded, in the order of its beginning, once all of it has ended."""
        timed = [(lane, name, *times()) for lane, name, times in self._found]
        spans = [Span(lane, name, self._seconds(begin), self._seconds(end)) for lane, name, begin, end in timed if end]
        return sorted(spans, key=lambda span: (span.begin_s, span.end_s))

    def _seconds(self, time: object) -> float:
        if isinstance(time, Stamp):
            time = time.get()
        if isinstance(time, float):
            return time - self._host_origin_s
        return self._device.seconds(self._origin, time)
