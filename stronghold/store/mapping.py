"""A unit's files on several drives, mapped in one piece."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from stronghold.formats.stripes import Stripes


def map_striped(paths: Sequence[Path], stripes: Stripes, capacity_bytes: int) -> mmap.mmap:
    """Returns memory of ``capacity_bytes`` that shows a unit's files. Raises OSError where the system refuses it."""
    if len(paths) == 1:
        with paths[0].open("r+b") as file:
            return mmap.mmap(file.fileno(), capacity_bytes)
    # A place for the stripes, which are mapped over it and go with it. Nobody touches it before, so it takes no memory.
    memory = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    descriptors = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
    try:
        for span in stripes.spans(0, capacity_bytes):
            _map_over(place + span.begin, span.end - span.begin, descriptors[span.file], span.offset)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return memory


_MAP_FIXED = 0x10  # on Linux, which Python's mmap does not offer
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map_over(address: int, length: int, descriptor: int, offset: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if call(address, length, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {length} bytes of a unit's file was refused ({os.strerror(error)})")
