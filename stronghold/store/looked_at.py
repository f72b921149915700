"""Which pages of mapped memory this process has looked at, as the kernel's page tables tell."""

from __future__ import annotations

import mmap
import os

import numpy as np

_ENTRY_BYTES = 8
_PRESENT_OR_SWAPPED = np.uint64(62)
"""The two highest bits of an entry of /proc/self/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst)."""


def looked_at(address: int, length_bytes: int, page_bytes: int) -> np.ndarray:
    """Returns the numbers of the pages of ``page_bytes`` from ``address`` on that were read or written.

    That is since the memory was mapped, or dropped by ``MADV_DONTNEED``. The kernel may add neighbours of a page that
    was read, and forget a page when memory is short. It is empty where the system has no such file.
    """
    first, last = address // mmap.PAGESIZE, -(-(address + length_bytes) // mmap.PAGESIZE)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a container without it: writes that nothing tells of are not seen
        return np.empty(0, dtype=np.int64)
    try:
        entries = os.pread(descriptor, _ENTRY_BYTES * (last - first), _ENTRY_BYTES * first)
    finally:
        os.close(descriptor)
    present = np.flatnonzero(np.frombuffer(entries, dtype=np.uint64) >> _PRESENT_OR_SWAPPED)
    begins = np.maximum((present + first) * mmap.PAGESIZE, address)
    ends = np.minimum((present + first + 1) * mmap.PAGESIZE, address + length_bytes)
    spans = zip((begins - address) // page_bytes, -(-(ends - address) // page_bytes), strict=True)
    return np.unique(np.concatenate([np.arange(begin, end) for begin, end in spans] or [np.empty(0, dtype=np.int64)]))
