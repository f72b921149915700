"""An accelerator as a device: copy streams beside the computation, over torch.accelerator, Stream and Event."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.memory import Common, HostBuffer
from stronghold.device.streams import Stream
from stronghold.device.work_line import Task


class Accelerator:
    """What is asked of PyTorch for one kind of accelerator. This is what all of them have; a kind may know better."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)

    def use(self) -> None:
        """Makes it the calling thread's current device."""
        torch.accelerator.set_device_index(self.device.index)

    def stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def within(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Makes ``stream`` the calling thread's current stream."""
        return stream

    def event(self, *, timing: bool = False) -> torch.Event:
        return torch.Event(self.device, enable_timing=timing)

    def pin(self, buffer: HostBuffer, copies: Sequence[torch.Stream]) -> bool:
        """Pins ``buffer`` where it lies, for the copies of these streams; returns whether it is pinned.

        PyTorch can pin memory that it allocates itself, and no other: that takes up to twice the size.
        """
        warn_once(
            f"host memory that is there cannot be pinned for the device {self.device.type!r}; training goes on with "
            "pageable memory, whose copies are slower and hold up the computation",
            "pin",
        )
        return False

    def free_bytes(self) -> int:
        # torch 2.9 has it in the module of each kind alone
        info = getattr(torch.accelerator, "get_memory_info", None) or torch.get_device_module(self.device).mem_get_info
        free, _ = info(self.device)
        return free

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self.device)

    def limit_memory(self, limit_bytes: int) -> None:
        """Lets PyTorch's allocator hold ``limit_bytes`` at most. Raises ValueError where the kind has no such limit."""
        raise ValueError(
            f"a limit of device memory needs a CUDA device (got {str(self.device)!r}); leave it out, or give the "
            "model a budget (device_memory=)"
        )


class AcceleratorEvent(Event):
    """An event in a device's stream; for the host it has happened once the device has passed it."""

    __slots__ = ("of_torch",)

    def __init__(self, of_torch: torch.Event) -> None:
        super().__init__()
        self.of_torch = of_torch

    @property
    def done(self) -> bool:
        # One that has failed was not recorded: the device knows nothing of it.
        return super().done and (self._error is not None or self.of_torch.query())

    def wait(self) -> None:
        super().wait()  # until it has been recorded at all: for the device an event that was not is no wait
        self.of_torch.synchronize()

    @property
    def recorded_now(self) -> bool:
        """Whether :meth:`recorded` would return at once."""
        return super().done

    def recorded(self) -> torch.Event:
        """Blocks until the event has been put into its stream, and returns what other streams can wait for."""
        super().wait()
        return self.of_torch


class AcceleratorStream(Stream):
    """A thread that issues copies to a stream of the device."""

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.of_torch = accelerator.stream()
        super().__init__(name)
        self.submit(accelerator.use)

    def _new_event(self) -> Event:
        return AcceleratorEvent(self._accelerator.event())

    def _now(self) -> torch.Event:
        event = self._accelerator.event(timing=True)
        event.record(self.of_torch)
        return event

    def _happen(self, event: Event) -> None:
        assert isinstance(event, AcceleratorEvent)
        event.of_torch.record(self.of_torch)
        event.happen()

    def _is_past(self, event: Event) -> bool:
        # A wait in the stream costs nothing, while to ask the driver whether it is needed would.
        return not isinstance(event, AcceleratorEvent) and super()._is_past(event)

    def _wait(self, event: Event) -> None:
        if isinstance(event, AcceleratorEvent):
            self.of_torch.wait_event(event.recorded())  # the stream waits, the thread goes on
        else:
            self._block_on(event)  # an update on the host: only the thread can wait for it

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._accelerator.within(self.of_torch):
            target.copy_(source, non_blocking=True)

    # Python's lock is what the threads that launch contend for: a copy that the device does is given to it at once.
    def _records_at_once(self) -> bool:
        return True

    def _copies_at_once(self, target: Tensor, source: Tensor) -> bool:
        return (target if target.is_cpu else source).is_pinned()  # the driver returns from others when they are done

    def _waits_at_once(self, event: Event) -> bool:
        return event.recorded_now if isinstance(event, AcceleratorEvent) else event.done

    def compute(self, task: Task) -> None:
        def within() -> None:
            with self._accelerator.within(self.of_torch):
                task()

        self.submit(within)


class AcceleratorDevice(Device):
    """One accelerator. Nothing here synchronises the whole device."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.torch_device = accelerator.device
        self.name = str(accelerator.device)
        self.fetches = AcceleratorStream("fetches", accelerator)
        self.root = AcceleratorStream("root", accelerator)
        self.gradients = AcceleratorStream("gradients", accelerator)
        self._copies = [self.fetches.of_torch, self.root.of_torch, self.gradients.of_torch]
        self._beside: torch.Stream | None = None
        self.updates = self.host_stream("updates")
        self.disk = self.host_stream("disk")
        self.reads = self.host_stream("reads")

    def host_stream(self, name: str) -> Stream:
        # A thread begins with the first device. Any may come to work on this one: a finalizer runs wherever it is due.
        stream = Stream(name)
        stream.submit(self._accelerator.use)
        return stream

    def buffer(self, length_bytes: int) -> Tensor:
        flat = torch.empty(length_bytes, dtype=torch.uint8, device=self.torch_device)
        self.copied(flat)
        return flat

    def copied(self, tensor: Tensor) -> None:
        # Said once, here: when the tensor goes the allocator waits for the copies under way before it lends the memory
        # out again.
        for stream in self._copies:
            tensor.record_stream(stream)

    def host_buffer(
        self, length_bytes: int, *, pinned: bool = True, private: bool = False, memory: Common | None = None
    ) -> HostBuffer:
        buffer = HostBuffer(length_bytes, private=private, memory=memory)
        buffer.pinned = pinned and length_bytes > 0 and self._accelerator.pin(buffer, self._copies)
        return self._counted(buffer)

    def compute_wait(self, event: Event) -> None:
        if isinstance(event, AcceleratorEvent):
            self._accelerator.current_stream().wait_event(event.recorded())
        else:
            event.wait()

    @property
    def current_stream(self) -> torch.Stream:
        return self._accelerator.current_stream()

    def used_here(self, tensors: Iterable[Tensor], stream: object) -> None:
        if (here := self._accelerator.current_stream()) != stream:
            for tensor in tensors:
                tensor.record_stream(here)

    def record_event(self) -> Event:
        event = AcceleratorEvent(self._accelerator.event())
        event.of_torch.record(self._accelerator.current_stream())
        event.happen()
        return event

    def compute_copy(self, target: Tensor, source: Tensor, *, add: bool = False) -> None:
        if add:
            target.add_(source.detach())
        else:  # to the host, too, behind which the engine waits once for all
            target.copy_(source.detach(), non_blocking=True)

    def beside(self, task: Task) -> Event:
        if self._beside is None:  # few optimizers ask for it
            self._beside = self._accelerator.stream()
        event = AcceleratorEvent(self._accelerator.event())
        with self._accelerator.within(self._beside):
            task()
        event.of_torch.record(self._beside)
        event.happen()
        return event

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        pass

    def stamp(self) -> torch.Event:
        event = self._accelerator.event(timing=True)
        event.record(self._accelerator.current_stream())
        return event

    def seconds(self, begin: object, end: object) -> float:
        begin, end = cast(torch.Event, begin), cast(torch.Event, end)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def origin(self) -> tuple[torch.Event, float]:
        stamp = self.stamp()
        stamp.synchronize()  # only then is the host's clock where the device's is
        return stamp, time.perf_counter()

    def free_bytes(self) -> int | None:
        return self._accelerator.free_bytes()

    def peak_bytes(self) -> int:
        return self._accelerator.peak_bytes()


_warned: set[str] = set()


def warn_once(text: str, what: str) -> None:
    """Warns of ``what`` unless the process was warned of it before."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
