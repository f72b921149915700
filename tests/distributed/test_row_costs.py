"""What each layer of a row takes, where layers that are alike are run once."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.row_costs import RowCosts
from stronghold.engine.planning.computation import ModelComputation
from stronghold.engine.planning.layer_traces import LayerTraces, call_of
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from tests.planner.machines import laptop, machine


def gpt_row(layers=5, frozen=()):
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, hidden=32, heads=4, sequence=16, vocabulary=100))
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    return LayeredGPT(model)


def sequential():
    """Layers of three kinds: wide, narrow, and narrow with frozen weights."""
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), *(nn.Linear(64, 64) for _ in range(3))]
    layers[5].requires_grad_(False)
    return LayeredSequential(nn.Sequential(*layers), lambda output, _: output.square().mean())


def costs(row, x, targets=None, of=machine):
    return RowCosts(row, of(), x, targets, dtype=None)


@pytest.mark.parametrize("frozen", [pytest.param((), marks=pytest.mark.long), (1, 2)])
def test_what_layers_take_is_the_same_where_nothing_is_shared(frozen, monkeypatch):
    ids = torch.empty((4, 16), dtype=torch.int64, device="meta")
    cases = [(gpt_row(4, frozen), ids, ids), (sequential(), torch.empty(4, 16), None)]

    def rows():
        return [costs(*case, of=of).of(samples) for case in cases for of, samples in ((machine, 4), (laptop, 2))]

    shared = rows()
    monkeypatch.setattr(RowCosts, "_traces_of", lambda *_: LayerTraces())
    assert shared == rows()


def test_the_first_and_the_last_layer_and_those_between_are_run_once_in_each_size(monkeypatch):
    ran = []
    for name in ("_run_layer", "_run_passes"):
        run = getattr(ModelComputation, name)
        monkeypatch.setattr(
            ModelComputation, name, lambda self, *args, run=run, **named: ran.append(args) or run(self, *args, **named)
        )
    ids = torch.empty((4, 16), dtype=torch.int64, device="meta")
    row = costs(gpt_row(), ids, ids)
    for number, samples in enumerate((4, 2, 1), 1):
        row.of(samples)
        assert [args[1] for args in ran if len(args) == 2] == [4, 2, 1][:number]  # samples, of forward and backward
        assert len(ran) == len(set(ran)) == 5 * number  # two more where the last one's input is its alone, and two else


def test_operations_of_each_layer_are_those_that_torch_counts():
    """Of the layer with values, run by itself."""
    model, x = sequential(), torch.randn(4, 16)
    rows = costs(model, x).of(4)
    for number, row in enumerate(rows):
        layer = model.stage(number, number + 1)
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
        assert sum(op.flops * count for op, count in row.forward.items()) == counter.get_total_flops() > 0


def test_layers_that_are_alike_may_take_inputs_of_other_sizes():
    """Of a convolutional network's layers that have the same weights, with fewer pixels each time."""
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for _ in range(4)]
    row = LayeredSequential(nn.Sequential(*layers), lambda output, _: output.square().mean())
    rows = costs(row, torch.empty(4, 8, 32, 32)).of(2)
    assert [one.input_bytes for one in rows] == [4 * 2 * 8 * size**2 for size in (32, 16, 8, 4)]
    flops = [sum(op.flops * count for op, count in one.forward.items()) for one in rows]
    assert flops == [4**n * flops[-1] for n in (3, 2, 1, 0)]


class Pooled(nn.Module):
    """Shows nothing of its ``pool``."""

    def __init__(self, pool):
        super().__init__()
        self.weight, self.pool = nn.Parameter(torch.ones(8)), pool

    def forward(self, x):
        return nn.functional.avg_pool1d(x * self.weight, self.pool) if self.pool > 1 else x * self.weight.sum()


def test_layers_that_show_alike_may_compute_something_else():
    """A layer behind another was taken for one like it, and all behind it for layers of its output's shape."""
    layers, x = [Pooled(1), Pooled(1), Pooled(8), Pooled(1), Pooled(1)], torch.randn(4, 16, 8)
    rows = costs(LayeredSequential(nn.Sequential(*layers), lambda output, _: output.square().mean()), x).of(4)
    for layer, row in zip(layers, rows, strict=True):
        assert row.input_bytes == x.nbytes
        x = layer(x)


def test_calls_are_alike_that_differ_in_nothing_that_computation_depends_on():
    x, y = torch.empty(2, 3), torch.empty(2, 3)
    assert call_of((x, 1), {"mask": None}) == call_of((y, 1), {"mask": None})
    others = [
        ((x, 2), {"mask": None}),
        ((x, 1.0), {"mask": None}),
        ((x, True), {"mask": None}),
        ((x, 1), {"mask": x}),
        ((x, 1), {"bias": None}),
        ((x.t(), 1), {"mask": None}),
        ((x.double(), 1), {"mask": None}),
        ((x[:1], 1), {"mask": None}),
        ((torch.empty(2, 3, requires_grad=True), 1), {"mask": None}),
    ]
    assert call_of((x, 1), {"mask": None}) not in [call_of(*other) for other in others]
    assert call_of((x, x), {}) != call_of((x, y), {})
    assert call_of((object(),), {}) != call_of((object(),), {})
