"""What calls cost: the small layer has as many operators as the planner counts in its passes."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stronghold.engine.planning.recording import Recording
from stronghold.probing.call_speed import BACKWARD_OPS, CHAIN_CALLS, LAYER_OPS, IssuedLayer, call_measures


def test_a_small_layer_has_the_operators_that_the_planner_counts():
    recording, forward, backward = Recording(), Counter(), Counter()
    with FakeTensorMode():
        layer, x = IssuedLayer(), torch.zeros(1, 4, 16, requires_grad=True)
        gradient = torch.ones_like(x)
        with recording:
            recording.begin(forward)
            y = layer(x)
            recording.begin(backward)
            torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    assert (sum(forward.values()), sum(backward.values())) == (LAYER_OPS, BACKWARD_OPS)


class Clock:
    """Counts the operators of what it times, and says that each takes a second."""

    def __init__(self, *, is_host: bool) -> None:
        self.device = SimpleNamespace(torch_device=torch.device("cpu"), is_host=is_host)
        self.counted: list[int] = []

    def timed(self, task: Callable[[], object], *, calls: int = 0) -> float:
        with Recording() as recording:
            recording.begin(ops := Counter())
            task()
        self.counted.append(sum(ops.values()))
        return float(self.counted[-1])

    issued = timed


@pytest.mark.parametrize(("is_host", "timed"), [(True, LAYER_OPS + BACKWARD_OPS), (False, CHAIN_CALLS)])
def test_what_an_operator_takes_is_measured_by_a_host_s_layer_or_a_device_s_chain(is_host, timed):
    """To issue a layer's two passes is by the operators of the forward one."""
    clock = Clock(is_host=is_host)
    (calls,) = call_measures(clock)
    found = calls.sample()
    assert clock.counted == [timed, LAYER_OPS + BACKWARD_OPS, CHAIN_CALLS]
    assert found["op_s",] == pytest.approx(1.0)
    assert found["host_call_s",] == pytest.approx(1.0)
    assert found["launch_s",] == pytest.approx((LAYER_OPS + BACKWARD_OPS) / 2 / LAYER_OPS)
