"""Crossings of several parameters, and random cases: some run each time, such as hold every pair; the rest are long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def few(*values: Sequence[Any], together: int = 2) -> list[tuple[Any, ...]]:
    """Returns combinations of one value each, in the order of ``itertools.product``, that have all of what is asked.

    For any ``together`` of the parameters, 2 unless it is said, each combination of their values is in one of them at
    least; ``together=1`` asks for each value. They are chosen one by one, each with as much as any has that is new.
    """
    every = list(itertools.product(*(range(len(some)) for some in values)))
    places = list(itertools.combinations(range(len(values)), together))
    has = {one: {(place, tuple(one[p] for p in place)) for place in places} for one in every}
    left, chosen = set().union(*has.values()), set[tuple[int, ...]]()
    while left:
        best = max(every, key=lambda one: len(has[one] & left))  # the first of those that have most
        chosen.add(best)
        left -= has[best]
    return [tuple(some[i] for some, i in zip(values, one, strict=True)) for one in every if one in chosen]


def crossed(*values: Sequence[Any], together: int = 2) -> list[Any]:
    """Returns all combinations for ``pytest.mark.parametrize``; those that are not among the ``few`` are long."""
    some = few(*(range(len(one)) for one in values), together=together)
    numbers = itertools.product(*(range(len(one)) for one in values))
    return [
        pytest.param(*combination, marks=() if number in some else pytest.mark.long)
        for number, combination in zip(numbers, itertools.product(*values), strict=True)
    ]


def seeds(every: int, each_time: int) -> list[Any]:
    """Returns the numbers below ``every`` for ``pytest.mark.parametrize``; those from ``each_time`` on are long."""
    return [pytest.param(seed, marks=() if seed < each_time else pytest.mark.long) for seed in range(every)]
