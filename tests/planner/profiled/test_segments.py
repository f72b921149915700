"""The corners of what recomputation saves, against all sets of operators."""

import random
from itertools import product

import pytest

from stronghold.planner.profiled.segments import LONGEST, OperatorSegment, corners, cuts
from tests.crossed import seeds


def runs(mask, segment):
    """Returns (saved, seconds, largest run, whether allowed and worth something) of the operators in ``mask``."""
    saved = run = peak = seconds = 0.0
    for number, one in enumerate(mask):
        seconds += segment.seconds[number] * one
        if one and number + 1 < len(mask) and mask[number + 1]:
            run += segment.held_bytes[number]
            saved += segment.held_bytes[number]
            continue
        last = segment.held_bytes[number] if one and segment.closes and number + 1 == len(mask) else 0.0
        peak, run = max(peak, run + last), 0.0
    return saved, seconds, peak, all(ok or not one for ok, one in zip(segment.allowed, mask, strict=True))


@pytest.mark.parametrize("seed", seeds(40, 15))
def test_no_set_is_better_than_the_corners_at_any_price(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    segment = OperatorSegment(
        tuple(float(rng.choice((0, rng.randint(1, 100)))) for _ in range(count)),
        tuple(float(rng.randint(1, 20)) for _ in range(count)),
        tuple(rng.random() < 0.8 for _ in range(count)),
        rng.random() < 0.5,
    )
    limit = rng.choice((float("inf"), 0.6 * sum(segment.held_bytes)))
    found = corners(segment, limit)
    every = [runs(mask, segment) for mask in product((0, 1), repeat=count)]
    every = [one for one in every if one[3] and one[2] <= limit]
    for corner in found:
        mask = [corner.operators >> n & 1 for n in range(count)]
        saved, seconds, peak, allowed = runs(mask, segment)
        assert allowed
        assert (saved, seconds) == pytest.approx((corner.saved_bytes, corner.seconds))
        assert peak == pytest.approx(corner.peak_bytes)
        assert peak <= limit
    for price in (0.01, 0.05, 0.1, 0.3, 1.0, 10.0):
        best = max(price * saved - seconds for saved, seconds, _, _ in every)
        assert max(price * one.saved_bytes - one.seconds for one in found) == pytest.approx(best)


def test_segments_begin_at_blocks_at_layers_and_before_they_are_too_long():
    begins = [False, True, False, False, True, *[False] * 30]
    repeats = [False, False, False, True, True, *[False] * 30]
    assert cuts(begins, repeats) == [(0, True), (1, True), (3, False), (4, True), (4 + LONGEST, False)]
