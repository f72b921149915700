"""How the bytes of a unit are dealt out in stripes over files on several drives: arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from stronghold.layout import round_up

_MOST_STRIPES = 64
"""Of a unit: each is a mapping of its own, of which Linux gives a process 65,530 (``vm.max_map_count``)."""


@dataclass(frozen=True)
class StripeSpan:
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
    def over(cls, files: int, capacity_bytes: int, piece_bytes: int) -> Stripes:
        """Returns how a unit of up to ``capacity_bytes`` is dealt out; a stripe is a whole number of pieces."""
        smallest = capacity_bytes if files == 1 else -(-capacity_bytes // _MOST_STRIPES)
        return cls(files, round_up(max(smallest, 1), piece_bytes))

    def share(self, file: int, length_bytes: int) -> int:
        """Returns how many of a unit's first ``length_bytes`` one file holds."""
        rounds, rest = divmod(length_bytes, self.files * self.stripe_bytes)
        return rounds * self.stripe_bytes + min(max(rest - file * self.stripe_bytes, 0), self.stripe_bytes)

    def spans(self, begin: int, end: int) -> Iterator[StripeSpan]:
        """Yields where the bytes from ``begin`` to ``end`` lie, in their order."""
        while begin < end:
            stripe, inside = divmod(begin, self.stripe_bytes)
            turn, file = divmod(stripe, self.files)
            length = min(self.stripe_bytes - inside, end - begin)
            yield StripeSpan(file, turn * self.stripe_bytes + inside, begin, begin + length)
            begin += length

    def transfers(self, begin: int, end: int, piece_bytes: int) -> Iterator[StripeSpan]:
        """Yields the same in pieces, in an order in which all the drives are busy from the first on."""
        if self.files == 1:
            yield from self.spans(begin, end)
            return
        queues: list[list[StripeSpan]] = [[] for _ in range(self.files)]
        for span in self.spans(begin, end):
            for at in range(span.begin, span.end, piece_bytes):
                length = min(piece_bytes, span.end - at)
                queues[span.file].append(StripeSpan(span.file, span.offset + at - span.begin, at, at + length))
        for turn in zip_longest(*queues):
            yield from (span for span in turn if span is not None)
