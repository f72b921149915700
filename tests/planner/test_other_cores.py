"""A machine with another number of cores: what they do takes time in proportion, and nothing else does."""

from dataclasses import fields

import pytest

from stronghold.planner.machine_file import Spread
from stronghold.planner.other_cores import cores_assumed, with_cores
from tests.planner.machines import laptop, machine

UPDATES = {"cores", "host_update_ns"}
COMPUTING = {
    *("matmul", "attention", "elementwise", "elementwise_cached", "transcendental", "device_update_ns"),
}


def spreads(value):
    if isinstance(value, Spread):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [spread for one in values for spread in spreads(one)]


@pytest.mark.parametrize("made", [machine, laptop])
@pytest.mark.parametrize("times", [2, 0.5, 1])
def test_what_cores_do_takes_time_in_proportion(made, times):
    measured = made(cores=8)
    found = with_cores(measured, int(8 * times))
    changing = UPDATES | (COMPUTING if measured.is_host else set())
    for name in (one.name for one in fields(measured)):
        before, after = getattr(measured, name), getattr(found, name)
        if name not in changing or not spreads(before):
            assert after == before or name == "cores"
            continue
        factor = 1 / times if name.endswith("_ns") else times
        for one, other in zip(spreads(before), spreads(after), strict=True):
            assert other == pytest.approx(tuple(factor * value for value in one))
    assert found.cores == 8 * times


def test_what_is_assumed_is_said():
    assert cores_assumed(machine(cores=8), 32) == (
        "32 cores, with memory in proportion: updates take 0.25 times as long as was measured with 8"
    )
    assert cores_assumed(laptop(cores=4), 2).endswith(
        "updates and computing take 2 times as long as was measured with 4"
    )


@pytest.mark.parametrize("cores", [0, -1, 1.5, True, "8"])
def test_what_is_no_number_of_cores_is_refused(cores):
    with pytest.raises(ValueError, match=r"cores must be a whole number of 1 or more"):
        with_cores(machine(), cores)
