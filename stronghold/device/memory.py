"""Host memory allocated to the byte, and shared out as tensors with storages of their own."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from torch import Tensor

from stronghold.units import format_bytes


class Buffer(Protocol):
    """A flat piece of memory, on the host or on the device."""

    length_bytes: int
    flat: Tensor

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor of ``shape`` and ``dtype`` that lies at ``offset_bytes``, with a storage of its own."""


class MappedBuffer:
    """Memory mapped into the process, shared out as tensors.

    The views have storages of their own: saving one tensor saves that tensor's bytes, and no library takes neighbours
    for tied weights. ``memory`` lives as long as any tensor over it.
    """

    def __init__(self, memory: mmap.mmap | memoryview, length_bytes: int, offset_bytes: int = 0) -> None:
        self.length_bytes = length_bytes
        self.memory = memory
        self._offset_bytes = offset_bytes
        self.flat = torch.frombuffer(memory, dtype=torch.uint8)[offset_bytes : offset_bytes + length_bytes]

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor of ``shape`` and ``dtype`` that lies at ``offset_bytes``."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self._offset_bytes + offset_bytes)
        if len(shape) == 1:
            return flat
        return flat.view(shape).data  # not a view of ``flat``, which would live on as a second user of the storage


@dataclass(frozen=True)
class Common:
    """Memory that so many processes have mapped, all zero at first."""

    mapped: mmap.mmap
    users: int


_HUGE_PAGE_BYTES = 2 * 2**20


class HostBuffer(MappedBuffer):
    """A flat piece of host memory, all zero: page-aligned, as long as asked for, never rounded up to a power of two.

    It is anonymous memory of its own rather than a torch allocation, so that it can be pinned where it lies
    (``torch.Tensor.pin_memory`` takes up to twice the size, pytorch #95823).

    With ``private`` nobody but the engine looks at it: children of fork do not have it, and whole huge pages in it are
    such where the system grants them (``/sys/kernel/mm/transparent_hugepage``), which direct transfers and processors
    are faster in. Without, a child shares it: a data loader's processes neither copy what is updated nor end for
    having looked at a parameter.

    With ``memory`` it is in memory that several processes have in common, of which each counts its part as its own.

    Raises MemoryError where the system refuses it.
    """

    def __init__(self, length_bytes: int, *, private: bool = False, memory: Common | None = None) -> None:
        self.owned_bytes = length_bytes
        self.pinned = False
        if memory is not None:
            self.mapped = memory.mapped
            super().__init__(memoryview(memory.mapped), length_bytes)
            self.owned_bytes = -(-length_bytes // memory.users)
            return
        try:
            # What has no whole huge page needs no room to begin at one.
            room = _HUGE_PAGE_BYTES if private and length_bytes >= _HUGE_PAGE_BYTES else 0
            kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
            mapped = mmap.mmap(-1, max(length_bytes, 1) + room, flags=kind | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, MemoryError) as error:
            raise MemoryError(
                f"the system refused {format_bytes(length_bytes)} of host memory ({error}); raise the process's limit "
                "(ulimit -v) or the container's, or train a smaller model"
            ) from error
        self.mapped = mapped
        # A view of its own, so that the end of the last tensor over it can be seen while the mapping is there.
        super().__init__(memoryview(mapped), length_bytes, _prepare(mapped, length_bytes) if private else 0)


def _prepare(memory: mmap.mmap, length_bytes: int) -> int:
    """Keeps memory from children and asks for huge pages; returns where in it a buffer of ``length_bytes`` begins.

    What is left of the buffer behind its last whole huge page gets ordinary ones, so that it takes no more than asked.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        # Else a page in transfer while the process forks could become the child's, and what arrives be lost; and what
        # the parent updates while the child lives would be there twice.
        memory.madvise(mmap.MADV_DONTFORK)
        _private.add(memory)
    whole = length_bytes - length_bytes % _HUGE_PAGE_BYTES
    if not whole:
        return 0
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return begin


_private: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Memory that children of fork do not have."""


def _leave_to_parent() -> None:
    """Keeps a child of fork from giving back memory that it does not have: at its address is what it mapped itself."""
    for memory in list(_private):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # for good: the interpreter's end would give it back, too


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def over(tensor: Tensor) -> Tensor:
    """Returns a flat tensor over the memory of a contiguous one on the host, which is not counted as its user.

    To see whether the user may write a tensor, the engine counts the users of its storage. The caller keeps the memory.
    """
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


class DeviceBuffer:
    """A flat piece of device memory, all zero; its views have storages of their own, like a host buffer's."""

    def __init__(self, flat: Tensor) -> None:
        self.length_bytes = flat.numel()
        self.flat = flat.zero_()

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor of ``shape`` and ``dtype`` that lies at ``offset_bytes``."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.flat.device)
        part = self.flat[offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype)
        return torch.from_dlpack(part).view(shape).data  # by DLPack it is a storage of its own


def available_host_bytes() -> int:
    """Returns how much host memory can still be had, swap included."""
    return psutil.virtual_memory().available + psutil.swap_memory().free


def resident_host_bytes() -> int:
    """Returns what the process has in RAM that is no file's: what it allocated and touched, shared memory with it."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = (line.split() for line in status)
        return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))
