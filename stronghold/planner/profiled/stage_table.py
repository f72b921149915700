"""The seconds of any stage whose operators are shared in a given way, looked up in sums over operators."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from stronghold.planner.profiled.layouts import Sharing
from stronghold.planner.profiled.predict import held_bytes, reshard_times, stage_costs
from stronghold.planner.profiled.profile import Profile
from stronghold.planner.profiled.recompute import CAPS, cached_corners, cheapest
from stronghold.planner.profiled.segments import NOTHING, Corner, OperatorSegment, corners

PRICES = 24
"""Of how many prices of a byte the choice of recomputed operators is tabled."""


class StageTable:
    """Stages of one sharing and one micro-batch.

    Recomputation is that of segments which may be taken in part, so that a stage's seconds are a little below what can
    be had: by less than what one segment's next step takes.
    """

    def __init__(
        self, profile: Profile, starts: Sequence[tuple[int, bool]], sharing: Sharing, micro_batch: int, memory: float
    ) -> None:
        """Raises ValueError for what was not profiled."""
        names, costs = profile.operators, stage_costs(profile, 0, sharing.choices, micro_batch)
        self.sharing, self.memory_bytes = sharing, memory
        self._copies = profile.family.copies
        self._input = [one.input_bytes for one in costs]
        send_s = profile.links.send_s
        self._receive_s = [[send_s(one.input_bytes, across=across) for one in costs] for across in (False, True)]
        self._send_s = [[send_s(one.output_bytes, across=across) for one in costs] for across in (False, True)]
        self._held_each = held_bytes(profile, names, costs)
        self._seconds_each = [one.forward_s for one in costs]
        self._reshard = [0.0, *(reshard_times(profile, names, costs, sharing.choices) or [0.0] * (len(names) - 1))]
        self.operator_s = [one.forward_s + one.backward_s for one in costs]
        self._time = _sums([one + change for one, change in zip(self.operator_s, self._reshard, strict=True)])
        self._weights = _sums([one.weight_bytes for one in costs])
        self._held = _sums(self._held_each)
        self._forward = _maxima([one.reserved_forward_bytes for one in costs])
        self._backward = _maxima([one.reserved_backward_bytes for one in costs])
        self._allowed = [name not in profile.family.kept for name in names]
        self._starts = [begin for begin, _ in starts]
        self._blocks = [block for _, block in starts]
        self._curves: dict[OperatorSegment, tuple[list[Corner], list[float]]] = {}
        self._parts: dict[tuple[int, int], tuple[list[Corner], list[float]]] = {}
        self._prices: list[float] | None = None

    def seconds(self, begin: int, end: int, behind: int, across: tuple[bool, bool], limit_s: float = math.inf) -> float:
        """Returns a micro-batch's seconds in the stage of operators ``begin`` to ``end``, infinite where it cannot fit.

        ``behind`` is the number of stages after it, ``across`` whether it gets from another node and sends to one.
        Where it takes more than ``limit_s`` the answer is some time above that.
        """
        seconds = self._time[end] - self._time[begin] - self._reshard[begin]
        seconds += self._receive_s[across[0]][begin] + self._send_s[across[1]][end - 1]
        if seconds > limit_s:
            return seconds
        weights = self._weights[end] - self._weights[begin]
        reserved = _most(self._forward, begin, end - 1) + _most(self._backward, begin, end - 1)
        held = self._input[begin] + self._held[end] - self._held[begin]
        lacking = weights * self._copies + max(reserved, weights) + held * (behind + 1) - self.memory_bytes
        return seconds if lacking <= 0 else seconds + self._recompute_s(begin, end, lacking, behind)

    def _recompute_s(self, begin: int, end: int, lacking: float, behind: int) -> float:
        """Returns the seconds of recomputation that save ``lacking`` bytes, between the two prices nearest to it."""
        if self._prices is None:
            self._table_prices()
        prices = self._prices or []
        first, last = bisect_left(self._starts, begin), bisect_right(self._starts, end) - 1
        if first > last:  # all within one segment
            parts, first, last = [self._part(begin, end)], 0, 0
        else:
            parts = [self._part(begin, self._starts[first]), self._part(self._starts[last], end)]

        def at(price: int) -> tuple[float, float, float]:
            if price < 0:
                return 0.0, 0.0, 0.0
            saved = self._saved[price][last] - self._saved[price][first]
            took = self._took[price][last] - self._took[price][first]
            peak = max(self._peaks[price][first:last], default=0.0)
            for curve, slopes in parts:
                corner = curve[bisect_right(slopes, prices[price])]
                saved, took, peak = saved + corner.saved_bytes, took + corner.seconds, max(peak, corner.peak_bytes)
            return saved * (behind + 1) - peak, took, peak

        low, high = -1, len(prices) - 1
        if high < 0:
            return math.inf
        gain, _, peak = at(high)
        if gain < lacking:
            return math.inf if gain + peak < lacking else self._shorter_runs_s(begin, end, lacking, behind)
        while high - low > 1:
            middle = (low + high) // 2
            if at(middle)[0] >= lacking:
                high = middle
            else:
                low = middle
        (gain, took, _), (more, longer, _) = at(low), at(high)
        return took + (longer - took) * max(lacking - gain, 0.0) / (more - gain)

    def _shorter_runs_s(self, begin: int, end: int, lacking: float, behind: int) -> float:
        """Returns the same of runs that are cut short, so that less comes back at one time."""
        places = range(bisect_right(self._starts, begin), bisect_left(self._starts, end))
        bounds = [(begin, True), *((self._starts[n], self._blocks[n]) for n in places), (end, False)]
        segments = [self._segment(b, e, block, closes) for (b, block), (e, closes) in pairwise(bounds)]
        largest = max(sum(segment.held_bytes) for segment in segments)
        found = math.inf
        for cap in CAPS[1:]:
            chosen = cheapest([cached_corners(segment, cap * largest) for segment in segments], lacking, behind)
            if chosen is not None:
                found = min(found, sum(one.seconds for one in chosen))
        return found

    def _table_prices(self) -> None:
        bounds = [*zip(self._starts, self._blocks, strict=True), (len(self._input), True)]
        curves = [self._curve(b, e, block, closes) for (b, block), (e, closes) in pairwise(bounds)]
        slopes = sorted({slope for _, slopes in {id(one): one for one in curves}.values() for slope in slopes})
        if len(slopes) > PRICES:
            slopes = [slopes[round(n * (len(slopes) - 1) / (PRICES - 1))] for n in range(PRICES)]
        self._prices = slopes
        self._saved, self._took, self._peaks = [], [], []
        for price in slopes:
            chosen = [curve[bisect_right(steps, price)] for curve, steps in curves]
            self._saved.append(_sums([one.saved_bytes for one in chosen]))
            self._took.append(_sums([one.seconds for one in chosen]))
            self._peaks.append([one.peak_bytes for one in chosen])

    def _part(self, begin: int, end: int) -> tuple[list[Corner], list[float]]:
        if begin >= end:
            return [NOTHING], []
        if (begin, end) not in self._parts:
            place = bisect_right(self._starts, begin) - 1
            block = self._blocks[place] or self._starts[place] != begin
            closes = end in self._starts and self._blocks[bisect_left(self._starts, end)]
            self._parts[begin, end] = self._curve(begin, end, block, closes)
        return self._parts[begin, end]

    def _curve(self, begin: int, end: int, block: bool, closes: bool) -> tuple[list[Corner], list[float]]:
        segment = self._segment(begin, end, block, closes)
        if segment not in self._curves:
            curve = corners(segment, math.inf)
            slopes = [(b.seconds - a.seconds) / (b.saved_bytes - a.saved_bytes) for a, b in pairwise(curve)]
            self._curves[segment] = curve, slopes
        return self._curves[segment]

    def _segment(self, begin: int, end: int, block: bool, closes: bool) -> OperatorSegment:
        allowed = self._allowed[begin:end]
        allowed[0] = allowed[0] and block
        return OperatorSegment(
            tuple(self._held_each[begin:end]), tuple(self._seconds_each[begin:end]), tuple(allowed), closes
        )


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _maxima(values: Sequence[float]) -> list[list[float]]:
    """Returns the largest of each 1, 2, 4, 8 … values from every place on."""
    levels, width = [list(values)], 1
    while 2 * width <= len(values):
        last = levels[-1]
        levels.append([max(last[n], last[n + width]) for n in range(len(values) - 2 * width + 1)])
        width *= 2
    return levels


def _most(levels: Sequence[Sequence[float]], begin: int, end: int) -> float:
    if end <= begin:
        return 0.0
    level = (end - begin).bit_length() - 1
    return max(levels[level][begin], levels[level][end - (1 << level)])
