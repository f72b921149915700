"""What recomputing a few operators saves, and for how many seconds: the best of it for one segment of a stage.

The operators of a segment are recomputed in runs; each run saves what all its operators but the last hold, and all of
that comes back at one time when its backward pass is there. The best sets of runs for all prices of a byte are the
corners of a convex curve of seconds over bytes, which Lagrangian relaxation finds one price at a time (Everett 1963).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 24
"""Operators of a segment at most: a longer one is cut."""


class Corner(NamedTuple):
    """One set of runs: what it saves of a micro-batch, its seconds, its largest run, and the operators as bits."""

    saved_bytes: float
    seconds: float
    peak_bytes: float
    operators: int


NOTHING = Corner(0.0, 0.0, 0.0, 0)


class OperatorSegment(NamedTuple):
    """Operators that are recomputed by themselves: what each holds and takes, and whether it may be recomputed.

    ``closes`` tells that a block begins behind it, whose recomputation lets the last operator's bytes come back too.
    """

    held_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    allowed: tuple[bool, ...]
    closes: bool


def corners(segment: OperatorSegment, limit_bytes: float) -> list[Corner]:
    """Returns the corners of the curve, by bytes saved from none up; no run brings back more than ``limit_bytes``."""
    # At this price, seconds count only between sets that save the same.
    dearest = max(segment.seconds, default=0.0) * len(segment.seconds)
    smallest = min((size for size in segment.held_bytes if size), default=1.0)
    most = _best(segment, limit_bytes, 1e3 * (dearest + 1e-9) / smallest)
    if most.saved_bytes <= 0:
        return [NOTHING]
    found = [NOTHING, *_between(segment, limit_bytes, NOTHING, most), most]
    return found


def _between(segment: OperatorSegment, limit_bytes: float, low: Corner, high: Corner) -> list[Corner]:
    price = (high.seconds - low.seconds) / (high.saved_bytes - low.saved_bytes)
    found = _best(segment, limit_bytes, price)
    gain = price * (found.saved_bytes - low.saved_bytes) - (found.seconds - low.seconds)
    if gain <= 1e-9 * max(high.seconds, 1e-12) or not low.saved_bytes < found.saved_bytes < high.saved_bytes:
        return []
    before = _between(segment, limit_bytes, low, found)
    return [*before, found, *_between(segment, limit_bytes, found, high)]


def _best(segment: OperatorSegment, limit_bytes: float, price: float) -> Corner:
    """Returns the set of runs that saves most, less its seconds, at ``price`` seconds a byte."""
    held, seconds, allowed, closes = segment
    count = len(held)
    closed: list[tuple[float, Corner]] = [(0.0, NOTHING)]  # with the operator before left alone
    open_: tuple[float, Corner] = closed[0]  # the better of that and a run that ends here
    for end in range(1, count + 1):
        ends = closed[end - 1] if closed[end - 1][0] >= open_[0] else open_
        closed.append(ends)
        open_ = (-1.0, NOTHING)
        if not allowed[end - 1]:
            continue
        saved, took, mask = 0.0, seconds[end - 1], 1 << (end - 1)
        last = held[end - 1] if closes and end == count else 0.0
        for begin in range(end - 2, -1, -1):
            if not allowed[begin]:
                break
            saved += held[begin]
            took += seconds[begin]
            mask |= 1 << begin
            if saved + last > limit_bytes:
                break
            value, one = closed[begin]
            if value + price * saved - took > open_[0]:
                peak = max(one.peak_bytes, saved + last)
                joined = Corner(one.saved_bytes + saved, one.seconds + took, peak, one.operators | mask)
                open_ = (value + price * saved - took, joined)
    return max(closed[count], open_, key=lambda found: found[0])[1]


def cuts(begins: Sequence[bool], repeats: Sequence[bool]) -> list[tuple[int, bool]]:
    """Returns where segments begin, as (operator, whether a block begins there).

    A block begins a segment, as does the first operator of a repeated layer, and whatever comes ``LONGEST`` operators
    after the last one. Where no block begins, the first operator of the segment has to be left alone, so that the run
    before it ends.
    """
    found = [(0, True)]
    for number in range(1, len(begins)):
        if begins[number] or repeats[number] or number - found[-1][0] == LONGEST:
            found.append((number, begins[number]))
    return found
