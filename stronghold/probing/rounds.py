"""Measures in rounds: each in turn, again and again, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stronghold.planner.machine_file import Spread

Key = tuple[Any, ...]
"""What a value is of: a kind, and what it is told apart by."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 15


Sample = Callable[[], Mapping[Key, float]]


class Measure(NamedTuple):
    """Something to measure: ``sample`` does so once and returns values by their keys, those of a call before it."""

    what: str
    sample: Sample


class Sampled(dict[Key, list[float]]):
    """The values that were found, by their keys."""

    def spread(self, key: Key) -> Spread:
        return Spread.of(self[key])


def sample_all(
    measures: Sequence[Measure],
    *,
    seconds: float,
    least: int = LEAST_ROUNDS,
    progress: Callable[[str, float], None] | None = None,
) -> Sampled:
    """Returns what ``measures`` find in ``least`` rounds or more, as many as ``seconds`` allow.

    A round before them warms up and is not counted. ``progress`` is called with what is measured next, and the share
    that is done.
    """
    found, begin_s, rounds = Sampled(), time.perf_counter(), 0
    while rounds <= MOST_ROUNDS:
        round_s = time.perf_counter()
        for number, measure in enumerate(measures):
            if progress is not None:
                done = (rounds + number / len(measures)) / (least + 1)
                progress(measure.what, min(1.0, max(0.9 * min(done, 1.0), (time.perf_counter() - begin_s) / seconds)))
            values = measure.sample()
            for key, value in values.items() if rounds else ():
                found.setdefault(key, []).append(value)
        rounds += 1
        now_s = time.perf_counter()
        if rounds > least and now_s + (now_s - round_s) > begin_s + seconds:
            break
    return found
