"""What goes from stage to stage, against what stages that compute return."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stronghold.distributed.shapes import Shapes


class Counting(nn.Linear):
    computed: list[torch.Size]

    def forward(self, x):
        self.computed.append(x.shape)
        return super().forward(x)


@pytest.fixture
def stages():
    Counting.computed = []
    return [Counting(8, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3).requires_grad_(False))]


INPUTS = [torch.randn(4, 8), torch.randn(2, 5, 8), torch.randn(8, 4).T, torch.randn(4, 8)]


def test_it_is_what_stages_return_that_compute(stages):
    shapes = Shapes(copy.deepcopy(stages), None)
    for inputs in INPUTS:
        expected = [inputs, first := stages[0](inputs), stages[1](first)]
        found = shapes.between(inputs)
        assert all(one.is_meta for one in found)
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.requires_grad == other.requires_grad and one.is_leaf


def test_the_type_is_that_in_which_the_stages_compute(stages):
    found = Shapes(stages, torch.bfloat16).between(torch.randn(4, 8, dtype=torch.bfloat16))
    assert [one.dtype for one in found] == 3 * [torch.bfloat16]


def test_a_shape_is_found_once(stages):
    shapes = Shapes(stages, None)
    for _ in range(2):
        for inputs in INPUTS:
            shapes.between(inputs)
    assert Counting.computed == [(4, 8), (2, 5, 8), (4, 8)]  # of them one by rows and one by columns


def test_what_is_found_under_inference_mode_is_what_is_trained_with(stages):
    shapes = Shapes(stages, None)
    with torch.inference_mode():
        evaluated = shapes.between(torch.randn(4, 8))
    assert [one.requires_grad for one in evaluated] == [False, True, True]
    assert not any(one.is_inference() for one in evaluated)
    assert all(one is other for one, other in zip(shapes.between(torch.randn(4, 8)), evaluated, strict=True))


def test_the_users_hooks_are_not_called_and_what_computes_a_weight_is(stages):
    seen = []
    for stage in stages:
        stage.register_forward_hook(lambda module, inputs, output: seen.append(output.sum().item()))
        stage.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    normed = nn.utils.spectral_norm(nn.Linear(3, 2))
    found = Shapes([*stages, normed], None).between(torch.randn(4, 8))
    assert found[-1].shape == (4, 2) and found[-1].requires_grad
    assert seen == []
    assert [len(stage._forward_hooks) for stage in stages] == [1, 1], "the model's own are gone"
