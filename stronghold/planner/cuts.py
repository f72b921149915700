"""Where a row of layers is cut for the least of a cost: dynamic programming over the ends of its stages."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stronghold.planner.offloaded_stages import Seconds
from stronghold.planner.stage_costs import StageCosts, StageRuns

AT_ONCE = 2**17
"""Stages that are looked at together, at the most: their numbers stay in a processor's cache."""
GUESSES = 30
CLOSE = 1e-6
"""So often, or so close to the least, is the time of the slowest stage halved in on before cuts are looked at."""


def time_s(runs: StageRuns, limit_bytes: float) -> Seconds:
    """Returns the seconds of stages, infinite where one does not fit the memory."""
    return runs.time_s(limit_bytes)


def least_bytes(runs: StageRuns, limit_bytes: float) -> Seconds:
    """Returns the least bytes of stages, infinite where they are more than a stage's memory."""
    least = runs.least_bytes()
    return np.where(least <= limit_bytes, least, math.inf)


def missing_bytes(runs: StageRuns, limit_bytes: float) -> Seconds:
    """Returns by how many bytes stages do not fit their memory, negative where they do."""
    return runs.least_bytes() - limit_bytes


def nearest(costs: StageCosts, limits: Sequence[float], most_s: float, ends: Sequence[int]) -> list[int]:
    """Returns where the row is cut so that no stage takes more than ``most_s``, as close to ``ends`` as can be."""
    wished = np.array(ends)

    def moved(runs: StageRuns, limit_bytes: float) -> Seconds:
        return np.where(
            runs.time_s(limit_bytes) <= most_s, np.abs(np.subtract(runs.ends, wished[runs.stage])), math.inf
        )

    return cut(costs, limits, moved, np.add, at_once=_is_swift(costs, limits))[1]


def fastest(costs: StageCosts, limits: Sequence[float]) -> tuple[float, list[int]]:
    """Returns the least time of the slowest stage, and where the row is cut for it; of several cuts that of ``cut``.

    No stage of it takes longer than the slowest of any cut that fits: of as many layers in each, say, or of one that is
    filled stage by stage up to a time which is halved in on. So a stage is not looked at that computes or fetches for
    longer than that, nor an end that so short stages before or behind it do not come to.
    """
    stages, layers, at_once = len(limits), len(costs.layers), _is_swift(costs, limits)
    most_s = min((_slowest_s(costs, limits, ends) for ends in _guesses(costs, limits)), default=math.inf)
    if most_s == math.inf:
        return cut(costs, limits, time_s, at_once=at_once)
    sums = costs.least_sums()
    if at_once:
        most_s = _filled_s(costs, limits, most_s, sums)
    most_s *= 1 + 1e-9  # of sums in another order
    last, first = [0], [layers]
    for _ in range(stages):
        last.append(min(_reach(values, last[-1], slack_s + most_s) for values, slack_s in sums))
        first.append(max(_reach_back(values, first[-1], slack_s + most_s) for values, slack_s in sums))
    within = [(first[stages - stage], last[stage]) for stage in range(stages + 1)]
    return cut(costs, limits, time_s, within=within, at_once=at_once)


def furthest(costs: StageCosts, limits: Sequence[float]) -> list[int]:
    """Returns where the row is cut if each stage, from the first one on, takes as many layers as its memory allows.

    There are no cuts where that does not come to the end: then none fits, if no stage but the last ever takes less with
    another layer. Behind the last one nothing is received.
    """
    stages, cuts = len(limits), [0]
    for stage, limit in enumerate(limits):
        if stage == stages - 1:
            has_room = _least_bytes(costs, stage, cuts[-1], len(costs.layers)) <= limit
            return [*cuts, len(costs.layers)] if has_room else []
        begin, most = cuts[-1], len(costs.layers) - (stages - 1 - stage)  # each of the others has a layer
        end = _furthest_end(costs, stage, begin, most, limit)
        if end == begin:
            return []
        cuts.append(end)
    return []


def _furthest_end(costs: StageCosts, stage: int, begin: int, most: int, limit_bytes: float) -> int:
    """Returns up to where a stage from ``begin`` on fits, no further than ``most``: ``begin`` if no layer does."""
    if costs.ratios is None:
        least_bytes = partial(_least_bytes, costs, stage, begin)
        return begin + bisect_right(range(begin + 1, most + 1), limit_bytes, key=least_bytes)
    end, step = begin, 2 * -(-len(costs.layers) // len(costs.held))  # few stages have more than twice an equal share
    while end < most:
        ends = np.arange(end + 1, min(most, end + step) + 1)
        more = int(np.searchsorted(costs.runs(stage, begin, ends).least_bytes(), limit_bytes, side="right"))
        end += more
        if more < len(ends):
            break
    return end


def _least_bytes(costs: StageCosts, stage: int, begin: int, end: int) -> int:
    return int(costs.runs(stage, begin, end).least_bytes())


def _guesses(costs: StageCosts, limits: Sequence[float]) -> Iterator[list[int]]:
    """Yields cuts that may be good: as many layers in each stage, as much to compute, and as many as fit."""
    stages, layers, computing_s = len(limits), len(costs.layers), costs.forward_s + costs.backward_s
    yield [layers * stage // stages for stage in range(stages + 1)]
    ends = [int(end) for end in np.searchsorted(computing_s, computing_s[-1] * np.arange(stages + 1) / stages)]
    for stage in range(1, stages):  # each has a layer
        ends[stage] = min(max(ends[stage], ends[stage - 1] + 1), layers - (stages - stage))
    yield [0, *ends[1:-1], layers]
    if found := furthest(costs, limits):
        yield found


def _slowest_s(costs: StageCosts, limits: Sequence[float], ends: Sequence[int]) -> float:
    if _is_swift(costs, limits):
        runs = costs.runs(np.arange(len(limits)), np.array(ends[:-1]), np.array(ends[1:]))
        return float(runs.time_s(np.array(limits)).max())
    cuts = zip(ends, ends[1:], limits, strict=False)
    return max(float(costs.runs(n, begin, end).time_s(limit)) for n, (begin, end, limit) in enumerate(cuts))


def _is_swift(costs: StageCosts, limits: Sequence[float]) -> bool:
    """Whether stages with different ends are timed at once: not if each has to find what it recomputes."""
    return costs.ratios is not None or min(limits) == math.inf


def _filled_s(
    costs: StageCosts, limits: Sequence[float], known_s: float, sums: Sequence[tuple[Seconds, float]]
) -> float:
    """Returns the slowest stage's time of a cut that fits, close to the least where longer stages take longer.

    Each stage in turn has as many layers as ``known_s``, the slowest's of another cut, or less allows.
    """
    low_s = max(float(values[-1]) / len(limits) - slack_s for values, slack_s in sums)
    known: dict[tuple[int, int], Seconds] = {}
    for _ in range(GUESSES):
        if low_s >= (1 - CLOSE) * known_s:
            break
        most_s = (low_s + known_s) / 2
        slowest_s = _filled_to(costs, limits, most_s, sums, known)
        if slowest_s <= most_s:
            known_s = slowest_s
        else:
            low_s = most_s
    return known_s


def _filled_to(
    costs: StageCosts,
    limits: Sequence[float],
    most_s: float,
    sums: Sequence[tuple[Seconds, float]],
    known: dict[tuple[int, int], Seconds],
) -> float:
    """Returns the slowest stage's time if each has as many layers as ``most_s`` allows, infinity if some are left."""
    stages, begin, slowest_s = len(limits), 0, 0.0
    for stage, limit in enumerate(limits):
        behind = stages - 1 - stage
        furthest = min(
            len(costs.layers) - behind, *(_reach(values, begin, slack_s + most_s) for values, slack_s in sums)
        )
        if furthest <= begin:
            return math.inf
        if (stage, begin) not in known or len(known[stage, begin]) < furthest - begin:
            known[stage, begin] = costs.runs(stage, begin, np.arange(begin + 1, furthest + 1)).time_s(limit)
        times_s = known[stage, begin][: furthest - begin]
        if not len(allowed := np.flatnonzero(times_s <= most_s)):
            return math.inf
        begin += int(allowed[-1]) + 1
        slowest_s = max(slowest_s, float(times_s[allowed[-1]]))
    return slowest_s if begin == len(costs.layers) else math.inf


def _reach(sums: Seconds, begin: int, most_s: float) -> int:
    return int(np.searchsorted(sums, sums[begin] + most_s, side="right")) - 1


def _reach_back(sums: Seconds, end: int, most_s: float) -> int:
    return int(np.searchsorted(sums, sums[end] - most_s, side="left"))


def cut(
    costs: StageCosts,
    limits: Sequence[float],
    cost: Callable[[StageRuns, float], Seconds],
    joined: Callable[[Seconds, Seconds], Seconds] = np.maximum,
    within: Sequence[tuple[int, int]] | None = None,
    *,
    at_once: bool | None = None,
) -> tuple[float, list[int]]:
    """Returns the least ``cost`` of all stages, and where the row is cut for it, both ends included.

    That is the most of any stage, or by ``joined`` their sum. The least of the first s stages over the first n layers
    follows from that of s - 1 stages over fewer. No cost need grow with a stage's layers: what a stage receives, or
    need not recompute, may make a longer one smaller. So all beginnings of a stage are looked at for each of its ends,
    at once; of several that are as good the first one is taken. Where all is infinite there are no cuts. ``within`` are
    the first and the last place, by the number of stages before it, that a cut there may be at. ``at_once`` tells that
    ``cost`` takes stages with different ends together, by default where what they recompute is given.
    """
    stages, layers = len(limits), len(costs.layers)
    at_once = costs.ratios is not None if at_once is None else at_once
    bounds = [(stage, layers - (stages - stage)) for stage in range(stages)] + [(layers, layers)]
    if within is not None:
        bounds = [(max(one[0], two[0]), min(one[1], two[1])) for one, two in zip(bounds, within, strict=True)]
    least = np.full(layers + 1, math.inf)  # of the stages so far, over so many of the layers
    least[0] = 0.0 if joined is np.add else -math.inf
    begins: list[NDArray[np.intp]] = []
    bounds[0] = (0, 0)
    for stage, limit in enumerate(limits):
        (first, last), (earliest, latest) = bounds[stage : stage + 2]
        extended, begin = np.full(layers + 1, math.inf), np.zeros(layers + 1, np.intp)
        step = max(1, AT_ONCE // max(1, last - first)) if at_once else 1
        for low in range(max(earliest, first + 1), latest + 1, step):
            high = min(low + step, latest + 1)
            firsts = np.arange(first, min(last, high - 2) + 1)
            if at_once:
                ends = np.arange(low, high)[:, None]
                taken = cost(costs.runs(stage, np.minimum(firsts, ends - 1), ends), limit)
                taken = np.where(firsts < ends, taken, math.inf)
            else:
                taken = cost(costs.runs(stage, firsts, low), limit)[None]
            worst = joined(least[firsts], taken)
            here = worst.argmin(axis=1)
            extended[low:high], begin[low:high] = worst[np.arange(high - low), here], first + here
        least = extended
        begins.append(begin)
    if least[layers] == math.inf:
        return math.inf, []
    cuts = [layers]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return float(least[layers]), cuts[::-1]
