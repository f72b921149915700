"""Promise 4, by simulated clocks: a step takes little more than its longest single resource."""

import pytest

from benchmarks.overlap import MACHINES, run, with_slow_host

UPDATES = ("deferred", "in_backward")


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_window_of_two_or_more_overlaps(machine, window, update):
    outcome = run(machine, layers=32, window=window, update=update, steps=1, paced=False)
    assert outcome.step_s > 0.5
    assert 1.0 <= outcome.ratio <= 1.03


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_updates_hide_that_take_nine_tenths_of_the_pass_above_them(machine, update):
    slow = with_slow_host(machine, update)
    outcome = run(slow, layers=32, window=2, update=update, steps=2, paced=False)
    above_s = outcome.busy_s["compute"] * (0.75 if update == "in_backward" else 0.25)
    assert outcome.busy_s["updates"] == pytest.approx(0.9 * above_s, rel=1e-3)
    assert outcome.longest == "compute"
    assert 1.0 <= outcome.ratio <= 1.03


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_with_the_first_layer_resident_nothing_is_left_to_wait_for(machine, update):
    """The first layer is updated last and needed first; even eight layers then hide all others' updates."""
    outcome = run(with_slow_host(machine, update), layers=8, window=2, update=update, steps=2, paced=False, resident=1)
    assert 1.0 - 1e-9 <= outcome.ratio <= 1.02


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_window_of_one_cannot(machine):
    outcome = run(machine, layers=32, window=1, update="deferred", steps=1, paced=False)
    assert outcome.ratio > 1.03


@pytest.mark.parametrize("window", [1, 2, 5, 32])
def test_the_link_carries_what_the_schedule_says(window):
    machine = MACHINES[0]
    outcome = run(machine, layers=32, window=window, update="deferred", steps=2, paced=False)
    layer_s = 4 * 50_358_272 / machine.speed.up
    assert outcome.busy_s["fetches"] == pytest.approx((2 * 32 - window) * layer_s, rel=1e-6)
    squares_s = 8 * (50_358_272 / 64**2) / machine.speed.down  # eight bytes travel with every gradient, here scaled up
    assert outcome.busy_s["gradients"] == pytest.approx(32 * (layer_s + squares_s), rel=1e-6)
    assert outcome.busy_s["updates"] == pytest.approx(32 * 28 * 50_358_272 / machine.speed.host, rel=1e-6)
    assert outcome.busy_s["compute"] == pytest.approx(32 * 8 * 50_358_272 * 4096 / machine.speed.flops, rel=1e-6)


def test_pacing_makes_the_wall_agree_with_the_clocks():
    machine = MACHINES[2]
    outcome = run(machine, layers=8, window=2, update="deferred", steps=1, paced=True)
    assert outcome.wall_s >= outcome.step_s * 0.98  # never faster; slower as the machine at hand is busy
