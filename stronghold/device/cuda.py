"""CUDA as a device: copy streams beside the computation, pinned host memory allocated to the byte."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.memory import Common, HostBuffer
from stronghold.device.streams import Stream, Task

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context


class CudaEvent(Event):
    """An event in a CUDA stream; for the host it has happened once the device has passed it."""

    __slots__ = ("cuda",)

    def __init__(self) -> None:
        super().__init__()
        # No timing, and a blocking wait: an event is waited for, and waiting must not burn a core.
        self.cuda = torch.cuda.Event(blocking=True)

    @property
    def done(self) -> bool:
        # One that has failed was not recorded: the driver knows nothing of it.
        return super().done and (self._error is not None or self.cuda.query())

    def wait(self) -> None:
        super().wait()  # until it has been recorded at all: a CUDA event that was not is no wait
        self.cuda.synchronize()

    def recorded(self) -> torch.cuda.Event:
        """Blocks until the event has been put into its stream, and returns what other streams can wait for."""
        super().wait()
        return self.cuda


class CudaStream(Stream):
    """A thread that issues copies to a CUDA stream of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.cuda = torch.cuda.Stream(device)
        super().__init__(name)
        self.submit(lambda: torch.cuda.set_device(device))

    def _new_event(self) -> Event:
        return CudaEvent()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.cuda)
        return event

    def _happen(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.cuda.record(self.cuda)
        event.happen()

    def _is_past(self, event: Event) -> bool:
        # A wait in the stream costs nothing, while to ask the driver whether it is needed would.
        return not isinstance(event, CudaEvent) and super()._is_past(event)

    def _wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self.cuda.wait_event(event.recorded())  # the stream waits, the thread goes on
        else:
            self._block_on(event)  # an update on the host: only the thread can wait for it

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.cuda):
            target.copy_(source, non_blocking=True)

    def compute(self, task: Task) -> None:
        def within() -> None:
            with torch.cuda.stream(self.cuda):
                task()

        self.submit(within)


class CudaDevice(Device):
    """One CUDA device. Nothing here synchronises the whole device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self.fetches = CudaStream("fetches", self.torch_device)
        self.root = CudaStream("root", self.torch_device)
        self.gradients = CudaStream("gradients", self.torch_device)
        self._copies = [self.fetches.cuda, self.root.cuda, self.gradients.cuda]
        self.updates = self.host_stream("updates")
        self.disk = self.host_stream("disk")
        self.reads = self.host_stream("reads")

    def host_stream(self, name: str) -> Stream:
        # A thread begins with the first device. Any may come to work on this one: a finalizer runs wherever it is due.
        device, stream = self.torch_device, Stream(name)
        stream.submit(lambda: torch.cuda.set_device(device))
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
        buffer.pinned = pinned and _pin(buffer, self.torch_device, self._copies)
        return self._counted(buffer)

    def compute_wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.recorded())
        else:
            event.wait()

    def record_event(self) -> Event:
        event = CudaEvent()
        event.cuda.record(torch.cuda.current_stream(self.torch_device))
        event.happen()
        return event

    def compute_copy(self, target: Tensor, source: Tensor, *, add: bool = False) -> None:
        (target.add_ if add else target.copy_)(source.detach())

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        pass

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def origin(self) -> tuple[torch.cuda.Event, float]:
        stamp = self.stamp()
        stamp.synchronize()  # only then is the host's clock where the device's is
        return stamp, time.perf_counter()

    def free_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        limit = int(torch.cuda.get_per_process_memory_fraction(self.torch_device) * total)
        return max(0, min(free, limit - torch.cuda.memory_allocated(self.torch_device)))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Lets PyTorch's allocator hold ``limit_bytes`` of ``device`` at most; more is torch's OutOfMemoryError."""
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)


_warned: set[str] = set()
_kept: list[mmap.mmap] = []
"""What the driver did not let go of. New memory at such an address would be taken for the old one, pages and all."""


def _pin(buffer: HostBuffer, device: torch.device, copies: Sequence[torch.cuda.Stream]) -> bool:
    """Pins ``buffer`` where it lies and returns True; warns once and returns False where the system refuses.

    ``copies`` are the streams whose copies it is for. The driver's call rather than the runtime's: a refusal of the
    runtime's stays behind as its last error, and the next kernel launch would report it.
    """
    if buffer.length_bytes == 0:
        return False
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    address = ctypes.c_void_p(buffer.flat.data_ptr())
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current in this thread
        result = driver.cuCtxGetCurrent(ctypes.byref(context))
        result = result or driver.cuMemHostRegister_v2(address, ctypes.c_size_t(buffer.length_bytes), _PORTABLE)
    if result != 0:
        _warn_once(
            f"pinning {buffer.length_bytes} bytes of host memory was refused (CUDA driver error {result}); training "
            "goes on with pageable memory, whose copies are slower and do not overlap as well. Raise the locked-memory "
            "limit (ulimit -l) or the container's, or ignore this",
            "pin",
        )
        return False
    # The registration goes with the last tensor over the memory, and the mapping after it. At the process's end both go
    # by themselves.
    handles = [ctypes.c_void_p(stream.cuda_stream) for stream in copies]
    mapped, process = buffer.mapped, os.getpid()
    weakref.finalize(buffer.memory, _unpin, driver, context, handles, address, mapped, process).atexit = False
    return True


def _unpin(
    driver: ctypes.CDLL,
    context: ctypes.c_void_p,
    copies: Sequence[ctypes.c_void_p],
    address: ctypes.c_void_p,
    mapped: mmap.mmap,
    process: int,
) -> None:
    """Called in any thread when no tensor is left over pinned memory, of which no copy is still to be issued."""
    if os.getpid() != process:  # a child of fork has neither the driver nor the pin
        return
    results = [driver.cuCtxPushCurrent_v2(context)]
    if results == [0]:
        # Copies that were issued may be under way, from the memory or into it.
        results += [driver.cuStreamSynchronize(stream) for stream in copies]
        results.append(driver.cuMemHostUnregister(address))
        results.append(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))
    if result := next(filter(None, results), 0):
        _kept.append(mapped)
        _warn_once(
            f"pinned host memory could not be given back ({len(mapped)} bytes, CUDA driver error {result}); it stays "
            "taken until the process ends. Look for what failed on the device before",
            "unpin",
        )


def _warn_once(text: str, what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
