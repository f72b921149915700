"""The C library's heap, where the CPU is the device: what a step frees, the next one allocates again."""

from __future__ import annotations

import ctypes
import weakref

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt's numbers, as in malloc.h
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""What glibc's own thresholds have come to once a block as large as its largest threshold was freed."""

_owners = 0


def keep_freed_memory(owner: object) -> None:
    """Lets the process keep the memory that tensors free, until ``owner``, and all others that asked, are gone.

    glibc gives each large tensor back to the system, which clears its pages when the next one is made: a twentieth to
    a tenth of a training step's time. Another C library than glibc is left as it is.
    """
    global _owners
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    if _owners == 0:
        libc.mallopt(_MMAP_MAX, 0)  # the heap for blocks of all sizes
        libc.mallopt(_TRIM_THRESHOLD, -1)
    _owners += 1
    weakref.finalize(owner, _give_back, libc).atexit = False


def _give_back(libc: ctypes.CDLL) -> None:
    global _owners
    _owners -= 1
    if _owners == 0:
        for name, value in _USUAL.items():
            libc.mallopt(name, value)
        libc.malloc_trim(0)
