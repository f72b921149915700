"""Where a row of layers is cut for the least of a cost: dynamic programming over the ends of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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


def cut(
    costs: StageCosts,
    limits: Sequence[float],
    cost: Callable[[StageEnding, float], Seconds],
    joined: Callable[[Seconds, Seconds], Seconds] = np.maximum,
) -> tuple[float, list[int]]:
    """Returns the least ``cost`` of all stages, and where the row is cut for it, both ends included.

    That is the most of any stage, or by ``joined`` their sum. The least of the first s stages over the first n layers
    follows from that of s - 1 stages over fewer. No cost need grow with a stage's layers: what a stage receives, or
    need not recompute, may make a longer one smaller. So all beginnings of a stage are looked at for each of its ends,
    at once; of several that are as good the first one is taken. Where all is infinite there are no cuts.
    """
    stages, layers = len(limits), len(costs.layers)
    least = np.full(layers + 1, math.inf)  # of the stages so far, over so many of the layers
    least[0] = 0.0 if joined is np.add else -math.inf
    begins: list[dict[int, int]] = []
    for stage, limit in enumerate(limits):
        extended = np.full(layers + 1, math.inf)
        begin: dict[int, int] = {}
        behind = stages - 1 - stage
        for end in range(stage + 1, layers - behind + 1) if behind else [layers]:
            worst = joined(least[stage:end], cost(costs.ending(stage, end, stage), limit))
            here = int(worst.argmin())
            extended[end], begin[end] = worst[here], stage + here
        least = extended
        begins.append(begin)
    if least[layers] == math.inf:
        return math.inf, []
    cuts = [layers]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return float(least[layers]), cuts[::-1]
