"""What issuing takes, in the computation of a thread that issues and computes: in sums by hand."""

from dataclasses import replace

import pytest

from stronghold.planner.host_work import with_issuing
from stronghold.planner.step_costs import HostWork, LayerWork, Machine, StepSettings

OWN = HostWork(forward_s=1, backward_s=2, streamed_forward_s=10, streamed_backward_s=20, again_s=100, update_s=1000)
MACHINE = Machine(
    h2d_bytes_per_s=1.0, d2h_bytes_per_s=1.0, host_update_ns=0.0, launch_s=0.5, host_work=OWN, runs_behind=False
)
LAYER = LayerWork(forward_s=5, backward_s=7, first_gradient_s=3, elements=1)


@pytest.mark.parametrize(
    ("layer", "resident", "in_backward", "forward_s", "backward_s"),
    [
        (LAYER, True, False, 3 * (0.5 + 1), 3 * (0.5 + 2) + 1000),
        (LAYER, True, True, 3 * (0.5 + 1), 3 * (0.5 + 2) + 1000),
        (LAYER, False, False, 3 * (0.5 + 10), 3 * (0.5 + 20)),
        (LAYER, False, True, 3 * (0.5 + 10), 3 * (0.5 + 20) + 1000),
        (replace(LAYER, elements=0), True, True, 3 * (0.5 + 1), 3 * (0.5 + 1)),
        (replace(LAYER, elements=0), False, True, 3 * (0.5 + 10), 3 * (0.5 + 10)),
        (replace(LAYER, recomputed=True), False, False, 3 * (0.5 + 10), 3 * (0.5 + 20 + 0.5 + 100)),
    ],
)
def test_a_layer_has_what_issuing_it_takes_in_each_pass_over_three_micro_batches(
    layer, resident, in_backward, forward_s, backward_s
):
    settings = StepSettings(window=1, pieces=3, in_backward=in_backward)
    found = with_issuing(layer, MACHINE, settings, resident=resident)
    assert (found.forward_s, found.backward_s) == (5 + forward_s, 7 + backward_s)
    assert replace(found, forward_s=5, backward_s=7) == layer


def test_a_device_that_runs_behind_the_host_computes_no_longer_for_it():
    machine = replace(MACHINE, runs_behind=True)
    assert with_issuing(LAYER, machine, StepSettings(window=1, pieces=3), resident=False) is LAYER
