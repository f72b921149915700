"""Reentrant checkpoints inside a layer, which have a backward pass of their own within the layer's."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stronghold
from tests.small import ADAMW, SIZE, Residual, assert_same_models, numbers, ordinary_loop, pair


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def both(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Row(Inner):
    """The same parameters in several parts, one after the other, the last one a checkpoint."""

    def forward(self, x):
        x = checkpoint(self.both, x, use_reentrant=True)
        x = checkpoint(self.both, self.both(x), use_reentrant=True)
        return checkpoint(self.down, x, use_reentrant=True)


class Beside(Inner):
    def forward(self, x):
        one, other = (checkpoint(self.both, x * scale, use_reentrant=True) for scale in (1.0, 0.5))
        return self.up(x) + one + other + self.both(x)


class Nested(Inner):
    def forward(self, x):
        def twice(y):
            return checkpoint(self.both, y, use_reentrant=True) + self.both(y)

        return x + checkpoint(twice, x, use_reentrant=True)


PLACED = [
    *({"window": w, "activations": kept} for w, kept in itertools.product((1, 3), ("keep", "recompute", "host"))),
    *({"resident": 3, "activations": kept} for kept in ("keep", "recompute")),
]


@pytest.mark.parametrize("block", [Row, Beside, Nested])
def test_gradients_are_to_the_bit_those_of_plain_pytorch_however_activations_are_kept(block):
    """The first such backward pass to end was taken for the whole one's end: its gradients were added up apart."""
    for placed in PLACED:
        plain, model = pair(lambda: Residual(layers=3, block=block), layers="layers", **placed)
        for each in (plain, model):
            each(numbers(1)[0]).backward()
        assert_same_models(model, plain, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("block", [Row, Beside, Nested])
def test_a_layer_is_updated_in_the_backward_pass_when_all_of_it_is_through(block, activations):
    plain, model = pair(lambda: Residual(layers=3, block=block), layers="layers", activations=activations)
    ours = stronghold.AdamW(model.parameters(), **ADAMW, update="in_backward")
    ordinary_loop(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), numbers(3))
    ordinary_loop(model, ours, numbers(3))
    assert_same_models(model, plain)
