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


def round_up(size: int, unit: int) -> int:
    """Returns the first multiple of ``unit`` that is not less than ``size``."""
    return -(-size // unit) * unit
