"""A Sequential is a row of layers: children with parameters, and what follows each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stronghold.distributed.layered_model import LayeredSequential
from stronghold.errors import ParallelError


def test_a_layer_is_a_child_with_parameters_and_those_without_behind_it():
    flat, first, relu, norm, last = nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    row = LayeredSequential(nn.Sequential(flat, first, relu, norm, last), F.mse_loss)
    assert [list(layer) for layer in row.layers] == [[flat, first, relu], [norm], [last]]
    assert list(row.stage(1, 3)) == [norm, last]


def test_stages_one_behind_the_other_are_the_model():
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    row, x = LayeredSequential(model, F.mse_loss), torch.randn(7, 3)
    for cut in (1, 2):
        assert torch.equal(row.stage(cut, 3)(row.stage(0, cut)(x)), model(x))
    assert row.loss(model[-1], torch.ones(2), torch.zeros(2)) == 1


def test_a_child_that_is_there_twice_is_two_layers():
    linear = nn.Linear(2, 2)
    row = LayeredSequential(nn.Sequential(linear, nn.ReLU(), linear), F.mse_loss)
    assert [layer[0] for layer in row.layers] == [linear, linear]


@pytest.mark.parametrize(
    "model,told",
    [(nn.Linear(2, 2), "got Linear"), (nn.Sequential(nn.ReLU(), nn.Flatten()), "of 2 children without any")],
)
def test_what_is_no_row_is_refused(model, told):
    with pytest.raises(ParallelError, match=told):
        LayeredSequential(model, F.mse_loss)
