"""How the bytes of a unit are dealt out in stripes over files on several drives, and mapped in one piece."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from stronghold.layout import round_up
from stronghold.native import PIECE_BYTES

_MOST_STRIPES = 64
"""Of a unit: each is a mapping of its own, of which Linux gives a process 65,530 (``vm.max_map_count``)."""


@dataclass(frozen=True)
class Span:
    """Bytes ``begin`` to ``end`` of a unit, which lie at ``offset`` of the file with the number ``file``."""

    file: int
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class Stripes:
    """The first ``stripe_bytes`` of a unit lie in the first of ``files`` files, as many in the next, and so on."""

    files: int
    stripe_bytes: int

    @classmethod
    def over(cls, files: int, capacity_bytes: int) -> Stripes:
        """Returns how a unit of up to ``capacity_bytes`` is dealt out; a stripe is a whole number of pieces."""
        smallest = capacity_bytes if files == 1 else -(-capacity_bytes // _MOST_STRIPES)
        return cls(files, round_up(max(smallest, 1), PIECE_BYTES))

    def share(self, file: int, length_bytes: int) -> int:
        """Returns how many of a unit's first ``length_bytes`` one file holds."""
        rounds, rest = divmod(length_bytes, self.files * self.stripe_bytes)
        return rounds * self.stripe_bytes + min(max(rest - file * self.stripe_bytes, 0), self.stripe_bytes)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Yields where the bytes from ``begin`` to ``end`` lie, in their order."""
        while begin < end:
            stripe, inside = divmod(begin, self.stripe_bytes)
            turn, file = divmod(stripe, self.files)
            length = min(self.stripe_bytes - inside, end - begin)
            yield Span(file, turn * self.stripe_bytes + inside, begin, begin + length)
            begin += length

    def transfers(self, begin: int, end: int) -> Iterator[Span]:
        """Yields the same as transfers to be made one behind another so that all the drives are busy from the first."""
        if self.files == 1:
            yield from self.spans(begin, end)
            return
        queues: list[list[Span]] = [[] for _ in range(self.files)]
        for span in self.spans(begin, end):
            for at in range(span.begin, span.end, PIECE_BYTES):
                length = min(PIECE_BYTES, span.end - at)
                queues[span.file].append(Span(span.file, span.offset + at - span.begin, at, at + length))
        for turn in zip_longest(*queues):
            yield from (span for span in turn if span is not None)


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
