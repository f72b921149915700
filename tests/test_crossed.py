"""tests/crossed.py: which combinations run each time."""

from itertools import combinations, product

import pytest

from tests.crossed import crossed, few


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (4, 3, 2, 2), (2, 2, 2, 2), (17, 3, 3)])
@pytest.mark.parametrize("together", [1, 2])
def test_every_value_and_every_pair_of_values_is_in_one(sizes, together):
    values = [[f"{place}{number}" for number in range(size)] for place, size in enumerate(sizes)]
    chosen = few(*values, together=min(together, len(sizes)))
    assert chosen == [one for one in product(*values) if one in chosen]
    for some in combinations(range(len(sizes)), min(together, len(sizes))):
        asked = set(product(*(values[place] for place in some)))
        assert {tuple(one[place] for place in some) for one in chosen} == asked


def test_they_are_few():
    assert few("ab", "xyz", together=1) == [("a", "x"), ("a", "z"), ("b", "y")]
    assert len(few(range(4), range(3), range(2), range(2))) == 12
    assert few("ab", "xy") == list(product("ab", "xy"))


def test_the_others_are_long():
    found = crossed("ab", "xy", [0, 1])
    assert [one.values for one in found] == list(product("ab", "xy", [0, 1]))
    assert [one.values for one in found if not one.marks] == few("ab", "xy", [0, 1])
    assert {mark.name for one in found for mark in one.marks} == {"long"}
