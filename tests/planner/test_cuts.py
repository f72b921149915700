"""The fastest cut, of which most stages are not looked at, against the one over all of them."""

import random

import numpy as np
import pytest

from stronghold.planner.cuts import cut, fastest, furthest, least_bytes, time_s
from stronghold.planner.offloaded_stages import OffloadedLayer, OffloadedStages
from stronghold.planner.stage_costs import LayerCost, StageCosts
from stronghold.planner.step_costs import Machine


def random_costs(seed):
    rng = random.Random(seed)
    layers, stages = rng.randint(4, 24), rng.randint(1, 4)
    row = [
        LayerCost(
            forward_s=rng.choice((0.0, rng.uniform(0.1, 2))),
            backward_s=rng.uniform(0.1, 4),
            weight_bytes=rng.randint(1, 50),
            activation_bytes=rng.randint(5, 20),
            input_bytes=rng.randint(1, 5),
        )
        for _ in range(layers)
    ]
    machine = Machine(h2d_bytes_per_s=rng.uniform(5, 50), d2h_bytes_per_s=rng.uniform(5, 50), host_update_ns=1e7)
    offloaded = OffloadedStages(
        window=rng.randint(1, 5),
        layers=[
            OffloadedLayer(slot_bytes=rng.randint(5, 50), gradient_bytes=rng.randint(0, 50), elements=10) for _ in row
        ],
        machine=rng.choice((machine, None)),
    )
    costs = StageCosts(
        row,
        [rng.randint(1, 4) for _ in range(stages)],
        rng.choice((None, [1.0] * stages, [0.0] * stages)),
        micro_batches=4,
        buffered=rng.choice((0, 4)),
        offloaded=rng.choice((None, offloaded)),
    )
    fullest = cut(costs, [float("inf")] * stages, least_bytes)[0]
    return costs, [fullest * rng.choice((0.9, 1.0, 1.3, 3.0)) for _ in range(stages)]


@pytest.mark.parametrize("block", range(10))
def test_the_fastest_cut_is_that_of_all_stages(block):
    found = 0
    for seed in range(30 * block, 30 * block + 30):
        costs, limits = random_costs(seed)
        assert fastest(costs, limits) == cut(costs, limits, time_s), seed
        found += fastest(costs, limits)[1] != []
    assert found > 10


def test_few_stages_are_looked_at_in_a_long_row(monkeypatch):
    layer = LayerCost(forward_s=1, backward_s=2, weight_bytes=1, activation_bytes=1, input_bytes=1)
    looked, runs = [], StageCosts.runs
    monkeypatch.setattr(StageCosts, "runs", lambda *of: looked.append(np.broadcast(*of[2:]).size) or runs(*of))
    costs = StageCosts([layer] * 320, [1] * 16, [1.0] * 16, micro_batches=16)
    assert fastest(costs, [1e9] * 16)[0] == 20 * 4
    of_fastest = sum(looked)
    cut(costs, [1e9] * 16, time_s)
    assert of_fastest < (sum(looked) - of_fastest) / 200


def test_as_many_layers_as_fit_from_the_first_stage_on():
    layers = [
        LayerCost(forward_s=1, backward_s=1, weight_bytes=n, activation_bytes=0, input_bytes=0) for n in (3, 3, 1, 4, 2)
    ]
    costs = StageCosts(layers, [1, 1, 1], [0.0] * 3, micro_batches=1)
    assert furthest(costs, [7, 4, 4]) == [0, 3, 4, 5]
    assert furthest(costs, [6, 5, 4]) == [0, 2, 4, 5]
    assert furthest(costs, [6, 4, 4]) == []  # 1 layer behind stage 1 is left over
    assert furthest(costs, [100, 100, 100]) == [0, 3, 4, 5]  # each has a layer
