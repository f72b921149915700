"""How far a plan's choice is above what else was trained, by rounds in which both were."""

import pytest

from benchmarks.plan_choice import _above_best


def row(*taken_s: float) -> dict:
    return {"settings": {}, "taken_s": list(taken_s)}


def test_it_is_the_median_of_the_rounds_ratios():
    """Of a machine that takes a tenth longer in some processes, two settings that are alike have unlike medians."""
    choice, alike, slower = row(1.0, 1.1, 1.1), row(1.0, 1.0, 1.1), row(1.5, 1.5, 1.5)
    assert _above_best({"choice": choice, "others": [slower, alike, row()]}) == (0.0, choice)
    faster = row(0.8, 1.0, 1.0)
    above, best = _above_best({"choice": choice, "others": [slower, alike, faster]})
    assert above == pytest.approx(0.1) and best is faster
