"""How an update of a unit on disk is cut into chunks that pass through memory: arithmetic alone, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stronghold.layout import GRAIN, PAGE_BYTES, Part, round_up


@dataclass(frozen=True)
class Array:
    """What one parameter has of one kind, in the file: ``width`` bytes for every ``per`` elements from ``begin`` on."""

    begin: int
    width: int
    per: int = 1

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Returns where the elements from ``first`` to ``end`` lie: (begin, end) in bytes."""
        return self.begin + first // self.per * self.width, self.begin + -(-end // self.per) * self.width


def chunks(parts: Iterable[Part], arrays: Sequence[Sequence[Array]], limit_bytes: int) -> list[list[Part]]:
    """Cuts ``parts`` of parameters with their ``arrays`` into chunks of at most ``limit_bytes`` in whole pages.

    The chunks hold all their elements in order. A part begins a chunk only where it does not fit the one before, and is
    cut at multiples of GRAIN alone, where it begins too. Raises ValueError for a limit that does not hold one grain of
    each.
    """
    result: list[list[Part]] = [[]]
    room = limit_bytes
    for part in parts:
        number, begin, count, own = part.number, part.begin, part.end, arrays[part.number]
        grain_bytes = _pages_of(own, 0, GRAIN)
        if min(grain_bytes, _pages_of(own, begin, count)) > limit_bytes:
            raise ValueError(f"a chunk must hold {grain_bytes} bytes (got limit_bytes={limit_bytes}); raise it")
        while begin < count:
            rest = _pages_of(own, begin, count)
            end = count if rest <= room else min(count, begin + (room // grain_bytes * GRAIN if grain_bytes else count))
            if end == begin:
                result.append([])
                room = limit_bytes
                continue
            result[-1].append(Part(number, begin, end))
            room -= _pages_of(own, begin, end)
            begin = end
    return [chunk for chunk in result if chunk]


def spans(parts: Iterable[Part], arrays: Sequence[Sequence[Array]]) -> list[tuple[int, int]]:
    """Returns the fewest runs of whole pages of the file, (begin, end) in bytes, that hold ``parts``."""
    wanted = sorted(array.span(part.begin, part.end) for part in parts for array in arrays[part.number])
    runs: list[tuple[int, int]] = []
    for begin, end in wanted:
        end = round_up(end, PAGE_BYTES)
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        elif begin < end:
            runs.append((begin, end))
    return runs


def _pages_of(arrays: Sequence[Array], begin: int, end: int) -> int:
    spans = [array.span(begin, end) for array in arrays]
    return sum(round_up(end, PAGE_BYTES) - begin for begin, end in spans)
