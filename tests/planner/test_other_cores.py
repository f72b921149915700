"""A machine with another number of cores: what they do takes time in proportion, and nothing else does."""

from dataclasses import fields, replace

import pytest

from stronghold.planner.machine_file import Attention, Spread
from stronghold.planner.machine_rates import op_rates
from stronghold.planner.op_costs import Op
from stronghold.planner.other_cores import cores_assumed, with_cores
from tests.planner.machines import about, laptop, machine

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


def test_attention_is_as_fast_as_such_a_machine_would_have_been_measured_to_be():
    """Its backward pass by heads: 3 of them take two cores as long as 4, and four cores half of that."""
    measured = laptop(cores=2, attention=[Attention("float32", (1, 3, 64, 64, 64), about(1e10), about(1e10))])
    found, wide = with_cores(measured, 4), with_cores(measured, 12)
    assert found.attention[0].backward_flop_per_s.likely == pytest.approx(2e10)
    assert wide.attention[0].backward_flop_per_s.likely == pytest.approx(6e10 / 3)  # 3 of 12 are at work, not 3 of 4
    assert wide.attention[0].forward_flop_per_s.likely == pytest.approx(6e10)
    alone = with_cores(replace(measured, threads=1), 6)  # of three threads, as one of two cores was used
    assert (alone.threads, alone.attention[0].backward_flop_per_s.likely) == (3, pytest.approx(3e10))
    op = Op("attention backward", "float32", (1, 24, 64, 64, 64), 10**10, 1, 24)
    taken_s = [op_rates(one).seconds({op: 1}) - one.op_s.likely for one in (measured, found, wide)]
    assert taken_s == pytest.approx([0.75, 0.75 / 2, 0.75 / 6])


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
