"""What the engine asks of a device."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from stronghold.device.events import Event
from stronghold.device.memory import Common, DeviceBuffer, HostBuffer
from stronghold.device.streams import Stream
from stronghold.device.timeline import Timeline
from stronghold.device.work_line import Task

_Kind = TypeVar("_Kind", HostBuffer, DeviceBuffer)


class Device(ABC):
    """Buffers, streams, and a clock.

    ``fetches`` copies layers to the device and ``root`` root parameters (apart, because one that is updated last would
    hold up the layers behind it), ``gradients`` copies from the device, ``updates`` works on the host, ``disk`` waits
    for what is being written, ``reads`` reads layers from there before their fetch. The computation itself is a stream
    that autograd issues from the caller's thread: ``compute_wait`` makes it wait, ``record_event`` records an event in
    it, ``compute_copy`` copies within it, ``compute_run`` and ``compute_now`` do other work in it.
    """

    name: str
    torch_device: torch.device
    is_host: bool = False
    """Whether its memory is the host's: parameters can be computed with where they lie, and slots read from disk."""
    fetches: Stream
    root: Stream
    gradients: Stream
    updates: Stream
    disk: Stream
    reads: Stream
    timeline: Timeline | None = None
    """Where what is done is noted, while a trace is taken."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self.resident_bytes = 0

    def host_stream(self, name: str) -> Stream:
        """Returns a stream for work on the host, whose thread may touch the device's memory and let go of it."""
        return Stream(name)

    @property
    def streams(self) -> list[Stream]:
        return [self.fetches, self.root, self.gradients, self.updates, self.disk, self.reads]

    @abstractmethod
    def buffer(self, length_bytes: int) -> Tensor:
        """Allocates a flat uint8 tensor on the device, for nobody but the engine to look at."""

    @abstractmethod
    def copied(self, tensor: Tensor) -> None:
        """Called before the copy streams work on device memory that :meth:`buffer` has not allocated."""

    def buffer_to_look_at(self, length_bytes: int) -> Tensor:
        """Allocates one in which parameters are to live."""
        return self.buffer(length_bytes)

    def device_buffer(self, length_bytes: int) -> DeviceBuffer:
        """Allocates device memory for what lives there, all zero, and counts it."""
        return self._counted(DeviceBuffer(self.buffer_to_look_at(length_bytes)))

    @abstractmethod
    def host_buffer(
        self, length_bytes: int, *, pinned: bool = True, private: bool = False, memory: Common | None = None
    ) -> HostBuffer:
        """Allocates host memory to the byte, pinned where copies need it and the system allows it, and counts it.

        ``private`` where nobody but the engine looks at it, and in ``memory`` that is there, as in :class:`HostBuffer`.
        """

    def _counted(self, buffer: _Kind) -> _Kind:
        """Counts what a new buffer takes, until it is given back."""
        if isinstance(buffer, HostBuffer):
            name, taken = "pinned_bytes" if buffer.pinned else "pageable_bytes", buffer.owned_bytes
        else:
            name, taken = "resident_bytes", buffer.length_bytes
        self._count(name, taken)
        weakref.finalize(buffer, self._count, name, -taken).atexit = False
        return buffer

    def _count(self, name: str, length_bytes: int) -> None:
        setattr(self, name, getattr(self, name) + length_bytes)

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Makes the computation issued from now on wait for ``event``."""

    def host_wait(self, event: Event) -> None:
        """Blocks the calling thread until ``event``."""
        event.wait()

    @property
    def current_stream(self) -> object:
        """In which the calling thread computes."""
        return None

    @abstractmethod
    def used_here(self, tensors: Iterable[Tensor], stream: object) -> None:
        """Notes that the calling thread's stream uses ``tensors``, which were made in ``stream``: their memory stays.

        Where forward passes are in a stream of the user's, the last layer's gradients come in it, and are added up in
        that of the caller of ``backward()``.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """Records an event behind the computation issued so far."""

    @abstractmethod
    def compute_copy(self, target: Tensor, source: Tensor, *, add: bool = False) -> None:
        """Copies device memory in the order of the computation, or adds it to what is there."""

    def compute_run(self, task: Task) -> None:
        """Runs ``task``, which works on device memory, in the order of the computation."""
        task()

    def compute_now(self, task: Task, moved_bytes: int = 0) -> None:
        """The same for work that what the caller computes next depends on; it moves ``moved_bytes`` on the device."""
        task()

    def beside(self, task: Task) -> Event:
        """Gives the device ``task``, of the host's updates, beside the computation and behind those given before.

        Returns the event after which it is done. Where the host computes, the calling thread carries it out.
        """
        task()
        return self.record_event()

    @abstractmethod
    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        """Tells that a computation has been issued that reads these buffers, of a layer of ``parameters`` elements.

        For devices that simulate its time or check that nobody overwrites what it reads; the others need not know.
        """

    @abstractmethod
    def stamp(self) -> object:
        """Notes the time in the computation's order, without waiting for it."""

    @abstractmethod
    def seconds(self, begin: object, end: object) -> float:
        """Returns the seconds between two stamps, once both have passed."""

    def origin(self) -> tuple[object, float]:
        """Returns one moment as a stamp and on the host's clock, to place stamps and the host's times beside another.

        May wait for the computation that was issued before.
        """
        stamp = self.stamp()
        assert isinstance(stamp, float)  # where the host computes there is one clock
        return stamp, stamp

    @contextmanager
    def noted(self, stream: Stream, name: str) -> Iterator[None]:
        """Notes what the block gives to ``stream``, as ``name``, while a timeline is recorded."""
        if self.timeline is None:
            yield
            return
        with self.timeline.on(stream, name):
            yield

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Returns the device memory that is free now, or None where the device does not say."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Returns the most device memory that tensors took so far, or 0 where the device does not count."""
