"""What calls cost: the small layer has as many operators as the planner counts in its forward pass."""

from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stronghold.engine.planning.recording import Recording
from stronghold.probing.call_speed import LAYER_OPS, IssuedLayer


def test_a_small_layer_has_the_operators_that_the_planner_counts():
    recording, ops = Recording(), Counter()
    with FakeTensorMode():
        layer, x = IssuedLayer(), torch.zeros(1, 4, 16)
        with recording:
            recording.begin(ops)
            layer(x)
    assert sum(ops.values()) == LAYER_OPS
