"""The CPU as a device: slots in ordinary memory, streams that are threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.memory import Common, HostBuffer
from stronghold.device.streams import Stream


class CpuDevice(Device):
    """Computes on the CPU, in the caller's thread; everything else runs in the threads of its streams.

    It is the same engine as on CUDA, so that a machine without a GPU can hold the engine to its ordering.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    is_host = True

    def __init__(self) -> None:
        super().__init__()
        self.fetches = self.stream("fetches")
        self.root = self.stream("root")
        self.gradients = self.stream("gradients")
        self.updates = self.stream("updates")
        self.disk = self.stream("disk")
        self.reads = self.stream("reads")

    def stream(self, name: str) -> Stream:
        return _HostStream(name)

    def buffer(self, length_bytes: int) -> Tensor:
        # At a page's beginning, for a disk is read straight into it; by DLPack its storage begins there, too.
        return torch.from_dlpack(HostBuffer(length_bytes, private=True).flat)

    def copied(self, tensor: Tensor) -> None:
        pass

    def buffer_to_look_at(self, length_bytes: int) -> Tensor:
        return torch.from_dlpack(HostBuffer(length_bytes).flat)  # a child of fork may look at it

    def host_buffer(
        self, length_bytes: int, *, pinned: bool = True, private: bool = False, memory: Common | None = None
    ) -> HostBuffer:
        return self._counted(HostBuffer(length_bytes, private=private, memory=memory))

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def record_event(self) -> Event:
        return _PAST  # the caller's thread computes: what it issued before is done

    def compute_copy(self, target: Tensor, source: Tensor, *, add: bool = False) -> None:
        (target.add_ if add else target.copy_)(source.detach())

    def used_here(self, tensors: Iterable[Tensor], stream: object) -> None:
        pass

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        pass

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin

    def free_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int:
        return 0


_SMALL_BYTES = 64 * 1024
"""What is copied in less time than it takes to wake a thread, some 30 microseconds."""
_FEW_CORES = 8
"""Up to so many, one thread copies. With many it may be too slow for what all of them compute; two were measured."""


class _HostStream(Stream):
    """One whose small copies are made by the thread that gives them, where nothing is before them."""

    def _records_at_once(self) -> bool:
        return True

    def _copies_at_once(self, target: Tensor, source: Tensor) -> bool:
        return target.nbytes <= _SMALL_BYTES

    def _waits_at_once(self, event: Event) -> bool:
        return event.passed

    def _copy(self, target: Tensor, source: Tensor) -> None:
        alike = target.dtype is source.dtype and target.shape == source.shape
        if alike and target.is_contiguous() and source.is_contiguous() and torch.get_num_threads() <= _FEW_CORES:
            # PyTorch would have a team of OpenMP's threads for this one, too. Where there are more of them than cores,
            # none waits in a loop for the others of its team any more, and each of a layer's operators takes longer.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.copy_(source)


_PAST = Event()
_PAST.happen()
