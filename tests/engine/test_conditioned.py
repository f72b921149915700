"""Layers that read a tensor with a graph from an attribute, which the model sets before it calls them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.errors import OffloadedModelError


class Layer(nn.Module):
    condition: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.other(torch.tanh(self.one(x * (1 + self.condition)))))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.into = way, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            layer.condition = torch.tanh(x.mean(1, keepdim=True))
        rows = x.new_zeros(len(self.layers), len(x), 1)
        for number, layer in enumerate(self.layers):
            if self.way == "each":
                layer.condition = torch.tanh(x.mean(1, keepdim=True))
            if self.way == "filled":
                rows[number] = torch.tanh(x.mean(1, keepdim=True))
                layer.condition = rows[number]
            x = layer(x)
        if self.way == "cleared":
            for layer in self.layers:
                layer.condition = None
        return x.square().mean()


def once(model: nn.Module, batches: list[Tensor]) -> None:
    model(batches[0]).backward()


def twice(model: nn.Module, batches: list[Tensor]) -> None:
    (model(batches[0]) + 2 * model(batches[1])).backward()


def with_evaluation_between(model: nn.Module, batches: list[Tensor]) -> None:
    loss = model(batches[0])
    with torch.no_grad():
        model(batches[1])
    loss.backward()


@pytest.mark.parametrize(
    "settings", [{"window": 1}, {"window": 2, "resident": 1}, {"window": 2, "activations": "host"}]
)
@pytest.mark.parametrize("loop", [once, twice, with_evaluation_between])
@pytest.mark.parametrize("way", ["all", "each", "cleared", "filled"])
def test_the_second_run_finds_the_condition_of_its_own_pass(way, loop, settings):
    torch.manual_seed(0)
    plain, batches = Model(way), [*torch.randn(2, 3, 8)]
    ours = copy.deepcopy(plain)
    stronghold.offload(ours, device="cpu", **settings)
    for _ in range(2):
        for model in (plain, ours):
            torch.manual_seed(1)
            loop(model, batches)
        for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name


def test_a_condition_that_was_written_in_between_is_refused():
    model = stronghold.offload(Model("all"), device="cpu", window=1)
    loss = model(torch.randn(3, 8))
    with torch.no_grad():
        model.layers[0].condition.mul_(2)
    with pytest.raises(OffloadedModelError, match="attribute condition of a Layer has been written"):
        loss.backward()


class Adding(nn.Module):
    """Adds to a loss that all layers share."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        self.total += y.square().mean()
        return x + y


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            layer.total = total
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + total


@pytest.mark.parametrize("loop", [once, twice])
def test_a_loss_that_layers_add_to_in_place_is_the_plain_models(loop):
    torch.manual_seed(0)
    plain, batches = Summed(), [*torch.randn(2, 3, 8)]
    ours = stronghold.offload(copy.deepcopy(plain), device="cpu", window=1)
    for model in (plain, ours):
        loop(model, batches)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
