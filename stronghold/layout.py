"""How a layer's tensors lie in one flat buffer: offsets and lengths in bytes, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT_BYTES = 64
"""Every tensor begins at a multiple of this, a cache line and the widest vector, as torch's own allocations do."""
PAGE_BYTES = 4096
"""What tensors on disk begin at a multiple of: memory is mapped in pages, and disks are read past the cache in blocks
of no more."""
BLOCK = 64
"""Elements of an 8-bit moment that share an exponent; csrc/formats.h has the same number."""
GRAIN = BLOCK * PAGE_BYTES
"""Elements. At multiples of this every array of a parameter on disk is at a page's beginning, the one with the fewest
bytes, an 8-bit moment's exponents with one for each block, too."""


@dataclass(frozen=True)
class Layout:
    """The places of tensors in one flat buffer, in the order they were given.

    ``offsets`` and ``sizes`` are in bytes, one for each tensor; ``total_bytes`` is the buffer's length, the padding
    between tensors included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int

    def runs(self, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (offset, length) in bytes of the fewest contiguous copies that carry the tensors ``wanted``.

        Neighbours are joined, the padding between them carried along: ``wanted`` is in ascending order.
        """
        if not wanted:
            return
        start = wanted[0]
        for one, other in pairwise(wanted):
            if other != one + 1:
                yield self._run(start, one)
                start = other
        yield self._run(start, wanted[-1])

    def _run(self, first: int, last: int) -> tuple[int, int]:
        return self.offsets[first], self.offsets[last] + self.sizes[last] - self.offsets[first]


def lay_out(sizes: Sequence[int], alignment: int = ALIGNMENT_BYTES) -> Layout:
    """Lays tensors of ``sizes`` bytes one behind the other, each at a multiple of ``alignment``.

    ``lay_out([100, 4])`` puts them at 0 and 128 and takes 132 bytes.
    """
    offsets, end = [], 0
    for size in sizes:
        begin = round_up(end, alignment)
        offsets.append(begin)
        end = begin + size
    return Layout(tuple(offsets), tuple(sizes), end)


@dataclass(frozen=True)
class Part:
    """The elements from ``begin`` to ``end`` of the parameter with this number."""

    number: int
    begin: int
    end: int


def shares(elements: int, count: int, grain: int, first: int = 0) -> list[tuple[int, int]]:
    """Cuts a parameter into ``count`` shares, (begin, end) in elements, one behind the other.

    They are cut at multiples of ``grain`` and differ by one grain at most; those that are longer begin with share
    ``first``, modulo ``count``, so that parameters of less than a grain do not all fall to the same.
    ``shares(10, 2, 4)`` is ``[(0, 8), (8, 10)]``.
    """
    each, more = divmod(-(-elements // grain), count)
    result, end = [], 0
    for number in range(count):
        begin = end
        end = min(elements, begin + grain * (each + ((number - first) % count < more)))
        result.append((begin, end))
    return result


def round_up(size: int, unit: int) -> int:
    """Returns the first multiple of ``unit`` that is not less than ``size``."""
    return -(-size // unit) * unit
