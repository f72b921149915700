"""Layers' costs against layers whose time and bytes are known, and that measuring leaves no trace."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.measuring import MOST_ROUNDS, ROUNDS, measure
from stronghold.errors import ParallelError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.machine_file import Spread
from tests.distributed import waiting
from tests.distributed.waiting import Waiting

CPU = torch.device("cpu")


def costs_of(*layers, inputs, **settings):
    row = LayeredSequential(nn.Sequential(*layers), loss=nn.functional.mse_loss)
    return measure(row, inputs, device=CPU, **settings)


def test_seconds_are_those_that_each_layer_takes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(waiting, "sleep", lambda seconds: now.append(now[-1] + seconds))
    waits_ms = [(10, 30), (25, 5), (0, 15)]
    layers = [Waiting(*wait) for wait in waits_ms]
    costs = costs_of(*layers, inputs=torch.randn(2, 4), clock=lambda: now[-1])
    for cost, (forward_ms, backward_ms) in zip(costs, waits_ms, strict=True):
        assert cost.forward_s == pytest.approx(forward_ms / 1000)
        assert cost.backward_s == pytest.approx(backward_ms / 1000)


def test_without_a_clock_it_is_the_time_of_the_day():
    (cost,) = costs_of(Waiting(10, 30), inputs=torch.randn(2, 4))
    assert cost.forward_s >= 0.01 and cost.backward_s >= 0.03  # a sleep never ends early


def test_layers_of_the_same_structure_are_computed_once():
    before = Waiting.computed
    layers = [Waiting(0, wait) for wait in (1, 1, 1, 2, 1)]
    costs = costs_of(*layers, inputs=torch.randn(2, 4, requires_grad=True), clock=lambda: 0.0)
    # The first is apart, since nothing before it needs a gradient.
    assert Waiting.computed - before == 3 * 2 * ROUNDS
    assert costs[1] is costs[2] is costs[4]


def test_rounds_go_over_all_layers_and_quartiles_are_kept():
    """Each pass takes longer than the one before it, whichever layer's: the rounds can be read off the times."""
    ticks = itertools.count()
    costs = costs_of(
        nn.Linear(4, 5), nn.Linear(5, 3), inputs=torch.randn(2, 4), clock=lambda: (n := next(ticks)) * (n - 1) / 4
    )
    # Of each round the first layer's first pass that counts, forward, then backward: read at ticks 0 and 1, 2 and 3.
    # Later rounds warm up with four ticks before.
    begins = [[0, 4]] + [[8 + 16 * n + 4, 8 + 16 * n + 12] for n in range(MOST_ROUNDS - 1)]
    for layer, cost in enumerate(costs):
        forward = [((n + 1) * n - n * (n - 1)) / 4 for n in (begin[layer] for begin in begins)]
        backward = [((n + 3) * (n + 2) - (n + 2) * (n + 1)) / 4 for n in (begin[layer] for begin in begins)]
        assert cost.forward_measured_s == Spread.of(forward) and cost.forward_s == Spread.of(forward).likely
        assert cost.backward_measured_s == Spread.of(backward) and cost.backward_s == Spread.of(backward).likely


class Times(nn.Module):
    """Multiplies by what autograd then keeps: its input, a buffer, or a parameter."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("fixed", torch.ones(8))

    def forward(self, x):
        if self.by == "a part":
            return (x + self.weight)[:, :1].square() + x
        return x * {"itself": x, "a buffer": self.fixed, "a parameter": self.weight}[self.by]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.relu_())


X = 4 * 8 * 4  # bytes of an input of 4 samples of 8 numbers


@pytest.mark.parametrize(
    ("layer", "kept_bytes"),
    [
        (nn.Linear(8, 16), X),
        (nn.Sequential(nn.Linear(8, 16), nn.Tanh()), X + 2 * X),
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X + 2 * X + 2 * X),
        (Times("itself"), X),
        (Times("a buffer"), 0),
        (Times("a parameter"), X),
        (Times("a part"), X),  # a view of what was computed keeps all of it
        (nn.BatchNorm1d(8), X + 2 * 8 * 4),  # the batch's mean and deviation
        (InPlace(), X),
    ],
)
def test_activation_bytes_are_what_autograd_keeps(layer, kept_bytes):
    first, second = costs_of(nn.Linear(8, 8), layer, inputs=torch.randn(4, 8))
    assert (first.activation_bytes, first.input_bytes, second.input_bytes) == (X, X, X)
    assert second.activation_bytes == kept_bytes


def test_weight_bytes_are_parameters_in_the_compute_type_and_buffers():
    linear, times = costs_of(
        nn.Linear(8, 8), Times("a buffer"), inputs=torch.randn(4, 8, dtype=torch.bfloat16), dtype=torch.bfloat16
    )
    assert linear.weight_bytes == 2 * (8 * 8 + 8)
    assert times.weight_bytes == 2 * 8 + 4 * 8
    assert (linear.input_bytes, times.input_bytes) == (2 * 4 * 8, 2 * 4 * 8)


def test_what_comes_before_and_behind_counts_with_the_layer_beside_it():
    head, tail = costs_of(nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), inputs=torch.randn(4, 2, 4))
    assert (head.activation_bytes, tail.activation_bytes) == (X, 2 * X)


def test_frozen_first_layers_keep_nothing_and_have_no_backward_pass():
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)
    behind, last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    costs = costs_of(frozen, behind, nn.Linear(8, 8), behind, last, inputs=torch.randn(4, 8))
    assert [cost.activation_bytes for cost in costs] == [0, 0, X, 0, X]
    assert [cost.backward_s > 0 for cost in costs] == [False, False, True, True, True]


CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=100)


def gpt_costs(device, **settings):
    with torch.device(device):
        row = LayeredGPT(GPT(CONFIG))
    return measure(row, torch.randint(100, (2, 16)), device=CPU, **settings)


def test_the_loss_counts_where_there_are_targets():
    without, with_loss = gpt_costs("cpu"), gpt_costs("cpu", targets=torch.randint(100, (2, 16)))
    assert [cost.activation_bytes for cost in without[:3]] == [cost.activation_bytes for cost in with_loss[:3]]
    # linear_cross_entropy keeps the gradients of what it scores and of the head.
    gradients_bytes = 4 * (2 * 16 * 32 + CONFIG.rows * 32)
    assert with_loss[3].activation_bytes - without[3].activation_bytes == gradients_bytes
    assert with_loss[0].weight_bytes - with_loss[1].weight_bytes == 4 * CONFIG.rows * 32
    assert with_loss[3].weight_bytes - with_loss[1].weight_bytes == 4 * (CONFIG.rows * 32 + 2 * 32)
    assert [cost.input_bytes for cost in with_loss] == [8 * 2 * 16] + 3 * [4 * 2 * 16 * 32]


def test_a_model_without_values_takes_the_bytes_of_one_that_has_them():
    targets = torch.randint(100, (2, 16))
    for real, meta in zip(gpt_costs("cpu", targets=targets), gpt_costs("meta", targets=targets), strict=True):
        for name in ("weight_bytes", "activation_bytes", "input_bytes"):
            assert getattr(real, name) == getattr(meta, name)


def test_nothing_of_the_model_changes_and_neither_do_random_states():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(inplace=True))
    inputs = torch.randn(4, 8)
    kept, given, state = copy.deepcopy(model.state_dict()), inputs.clone(), torch.get_rng_state()
    done = []
    row = LayeredSequential(model, nn.functional.mse_loss)
    measure(row, inputs, device=CPU, progress=lambda now, count: done.append((now, count)), clock=lambda: 0.0)
    assert done == [(now, 3 * ROUNDS) for now in range(1, 3 * ROUNDS + 1)]
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(inputs, given)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Pair(nn.Linear):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((nn.Linear(8, 8), nn.Linear(7, 8)), r"layer 1 got \(4, 8\) of torch.float32, and: (addmm: )?mat1 and mat2"),
        ((Pair(8, 8),), r"layer 0 got \(4, 8\) of torch.float32, and: it returned tuple, not one tensor"),
    ],
)
def test_a_layer_that_cannot_compute_what_it_gets_is_refused(layers, message):
    with pytest.raises(ParallelError, match=message):
        costs_of(*layers, inputs=torch.randn(4, 8))
