"""What CUDA alone has: host memory pinned where it lies, events whose waiting takes no core, a limit of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch

from stronghold.device.accelerator import Accelerator, warn_once
from stronghold.device.memory import HostBuffer

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context


class Cuda(Accelerator):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def use(self) -> None:
        torch.cuda.set_device(self.device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def within(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def event(self, *, timing: bool = False) -> torch.cuda.Event:
        # A blocking wait, which torch.Event has not: an event is waited for, and waiting must not burn a core.
        return torch.cuda.Event(enable_timing=timing, blocking=True)

    def pin(self, buffer: HostBuffer, copies: Sequence[torch.Stream]) -> bool:
        return _pin(buffer, self.device)

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        limit = int(torch.cuda.get_per_process_memory_fraction(self.device) * total)
        return max(0, min(free, limit - torch.cuda.memory_allocated(self.device)))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def limit_memory(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device.index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), self.device.index)


_kept: list[mmap.mmap] = []
"""What the driver did not let go of. New memory at such an address would be taken for the old one, pages and all."""


def _pin(buffer: HostBuffer, device: torch.device) -> bool:
    """Pins ``buffer`` where it lies and returns True; warns once and returns False where the system refuses.

    The driver's call rather than the runtime's: a refusal of the runtime's stays behind as its last error, and the next
    kernel launch would report it.
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
        warn_once(
            f"pinning {buffer.length_bytes} bytes of host memory was refused (CUDA driver error {result}); training "
            "goes on with pageable memory, whose copies are slower and do not overlap as well. Raise the locked-memory "
            "limit (ulimit -l) or the container's, or ignore this",
            "pin",
        )
        return False
    # The registration goes with the last tensor over the memory, and the mapping after it. At the process's end both go
    # by themselves.
    mapped, process = buffer.mapped, os.getpid()
    weakref.finalize(buffer.memory, _unpin, driver, context, address, mapped, process).atexit = False
    return True


def _unpin(
    driver: ctypes.CDLL,
    context: ctypes.c_void_p,
    address: ctypes.c_void_p,
    mapped: mmap.mmap,
    process: int,
) -> None:
    """Called in any thread when no tensor is left over pinned memory, of which no copy is still to be issued."""
    if os.getpid() != process:  # a child of fork has neither the driver nor the pin
        return
    results = [driver.cuCtxPushCurrent_v2(context)]
    if results == [0]:
        # Copies that were issued may be under way, from the memory or into it: the engine's, and a loop's own.
        results.append(driver.cuCtxSynchronize())
        results.append(driver.cuMemHostUnregister(address))
        results.append(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))
    if result := next(filter(None, results), 0):
        _kept.append(mapped)
        warn_once(
            f"pinned host memory could not be given back ({len(mapped)} bytes, CUDA driver error {result}); it stays "
            "taken until the process ends. Look for what failed on the device before",
            "unpin",
        )
