"""The memory of tensors where the CPU is the device: what a step frees, the next one allocates again."""

from __future__ import annotations

import ctypes
import weakref

import torch

from stronghold.native.extension import _C

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt's numbers, as in malloc.h
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""What glibc's own thresholds have come to once a block as large as its largest threshold was freed."""

_holders = _owners = 0


def hold_tensor_heap(holder: object) -> weakref.finalize:
    """Has large tensors' memory from our own heap, until ``holder`` is gone or what is returned was called.

    It ends with the last of all holders, and what is free there goes back to the system. In glibc's heap small objects
    lie between large tensors, in what these left free: tensors as large do not fit there any more, and the process
    grows by a tenth to a quarter beyond what it ever held at once. Where the memory of tensors is not glibc's, or
    PyTorch was told to ask for huge pages, it stays where it is.
    """
    global _holders
    if _holders == 0:
        torch.empty(2**16, device="cpu")  # so that the linker has looked up whom PyTorch calls for memory
        if not (_C.tensor_heap(True) and _has_tensors()):
            _C.tensor_heap(False)
    _holders += 1
    end = weakref.finalize(holder, _end_holding)
    end.atexit = False
    return end


def _has_tensors() -> bool:
    """Whether a large tensor lies in our own heap."""
    _, before = _C.tensor_heap_bytes()
    tensor = torch.empty(2**22, dtype=torch.uint8, device="cpu")
    _, with_it = _C.tensor_heap_bytes()
    return with_it >= before + tensor.nbytes


def _end_holding() -> None:
    global _holders
    _holders -= 1
    if _holders == 0:
        _C.tensor_heap(False)


def keep_freed_memory(owner: object) -> None:
    """Lets the heap keep all memory that tensors free, until ``owner``, and all others that asked, are gone.

    Else the largest tensors give theirs back to the system, and with glibc many others do, which clears the pages when
    the next one is made: a twentieth to a tenth of a training step's time. Another C library than glibc is left as it
    is.
    """
    global _owners
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    if _owners == 0:
        _C.tensor_heap_keeps(True)
        libc.mallopt(_MMAP_MAX, 0)  # the heap for blocks of all sizes
        libc.mallopt(_TRIM_THRESHOLD, -1)
    _owners += 1
    weakref.finalize(owner, _give_back, libc).atexit = False


def _give_back(libc: ctypes.CDLL) -> None:
    global _owners
    _owners -= 1
    if _owners == 0:
        _C.tensor_heap_keeps(False)
        for name, value in _USUAL.items():
            libc.mallopt(name, value)
        return_free_memory()


def return_free_memory() -> None:
    """Gives memory back to the system that was freed and is held for later, by our own heap or the C library."""
    _C.trim_tensor_heap()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)
