"""Where a row of layers is cut for the least of a cost: dynamic programming over the ends of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stronghold.planner.offloaded_stages import Seconds
from stronghold.planner.stage_costs import StageCosts, StageEnding


def time_s(ending: StageEnding, limit_bytes: float) -> Seconds:
    """Returns the seconds of a stage, infinite where it does not fit the memory, by first layer."""
    return ending.time_s(limit_bytes)


def least_bytes(ending: StageEnding, limit_bytes: float) -> Seconds:
    """Returns the least bytes of a stage, infinite where they are more than its memory."""
    least = ending.least_bytes()
    return np.where(least <= limit_bytes, least, math.inf)


def missing_bytes(ending: StageEnding, limit_bytes: float) -> Seconds:
    """Returns by how many bytes a stage does not fit its memory, negative where it does."""
    return ending.least_bytes() - limit_bytes


def nearest(costs: StageCosts, limits: Sequence[float], most_s: float, ends: Sequence[int]) -> list[int]:
    """Returns where the row is cut so that no stage takes more than ``most_s``, as close to ``ends`` as can be."""

    def moved(ending: StageEnding, limit_bytes: float) -> Seconds:
        return np.where(ending.time_s(limit_bytes) <= most_s, abs(ending.end - ends[ending.stage]), math.inf)

    return cut(costs, limits, moved, np.add)[1]


def fastest(costs: StageCosts, limits: Sequence[float]) -> tuple[float, list[int]]:
    """Returns the least time of the slowest stage, and where the row is cut for it; of several cuts that of ``cut``.

    No stage of it takes longer than the slowest of any cut that fits: of as many layers in each, say. So a stage is not
    looked at that computes or fetches for longer than that, nor an end that so short stages before or behind it do not
    come to.
    """
    stages, layers = len(limits), len(costs.layers)
    most_s = min((_slowest_s(costs, limits, ends) for ends in _guesses(costs, limits)), default=math.inf)
    if most_s == math.inf:
        return cut(costs, limits, time_s)
    most_s *= 1 + 1e-9  # of sums in another order
    sums = costs.least_sums()
    last, first = [0], [layers]
    for _ in range(stages):
        last.append(min(_reach(values, last[-1], slack_s + most_s) for values, slack_s in sums))
        first.append(max(_reach_back(values, first[-1], slack_s + most_s) for values, slack_s in sums))
    return cut(costs, limits, time_s, within=[(first[stages - stage], last[stage]) for stage in range(stages + 1)])


def furthest(costs: StageCosts, limits: Sequence[float]) -> list[int]:
    """Returns where the row is cut if each stage, from the first one on, takes as many layers as its memory allows.

    There are no cuts where that does not come to the end: then none fits, if no stage ever takes less with another
    layer.
    """
    stages, cuts = len(limits), [0]
    for stage, limit in enumerate(limits):
        low, high = cuts[-1], len(costs.layers) - (stages - 1 - stage)  # each of the others has a layer
        while low < high:
            middle = (low + high + 1) // 2
            if costs.ending(stage, middle, cuts[-1]).least_bytes()[0] <= limit:
                low = middle
            else:
                high = middle - 1
        if low == cuts[-1]:
            return []
        cuts.append(low)
    return cuts if cuts[-1] == len(costs.layers) else []


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
    cuts = zip(ends, ends[1:], limits, strict=False)
    return max(float(costs.ending(n, end, begin).time_s(limit)[0]) for n, (begin, end, limit) in enumerate(cuts))


def _reach(sums: Seconds, begin: int, most_s: float) -> int:
    return int(np.searchsorted(sums, sums[begin] + most_s, side="right")) - 1


def _reach_back(sums: Seconds, end: int, most_s: float) -> int:
    return int(np.searchsorted(sums, sums[end] - most_s, side="left"))


def cut(
    costs: StageCosts,
    limits: Sequence[float],
    cost: Callable[[StageEnding, float], Seconds],
    joined: Callable[[Seconds, Seconds], Seconds] = np.maximum,
    within: Sequence[tuple[int, int]] | None = None,
) -> tuple[float, list[int]]:
    """Returns the least ``cost`` of all stages, and where the row is cut for it, both ends included.

    That is the most of any stage, or by ``joined`` their sum. The least of the first s stages over the first n layers
    follows from that of s - 1 stages over fewer. No cost need grow with a stage's layers: what a stage receives, or
    need not recompute, may make a longer one smaller. So all beginnings of a stage are looked at for each of its ends,
    at once; of several that are as good the first one is taken. Where all is infinite there are no cuts. ``within`` are
    the first and the last place, by the number of stages before it, that a cut there may be at.
    """
    stages, layers = len(limits), len(costs.layers)
    least = np.full(layers + 1, math.inf)  # of the stages so far, over so many of the layers
    least[0] = 0.0 if joined is np.add else -math.inf
    begins: list[dict[int, int]] = []
    for stage, limit in enumerate(limits):
        extended = np.full(layers + 1, math.inf)
        begin: dict[int, int] = {}
        behind = stages - 1 - stage
        first, earliest, latest = stage, stage + 1, layers - behind
        if within is not None:
            first = max(first, within[stage][0])  # what a stage begins with, the one before ends at
            earliest, latest = max(earliest, within[stage + 1][0], first + 1), min(latest, within[stage + 1][1])
        for end in range(earliest, latest + 1) if behind else [layers]:
            worst = joined(least[first:end], cost(costs.ending(stage, end, first), limit))
            here = int(worst.argmin())
            extended[end], begin[end] = worst[here], first + here
        least = extended
        begins.append(begin)
    if least[layers] == math.inf:
        return math.inf, []
    cuts = [layers]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return float(least[layers]), cuts[::-1]
