"""Weights that are used several times under one autocast block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.small import SIZE, Residual

WAYS = ["recompute", "keep", "host"]


class Tied(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight  # type: ignore[union-attr]


class Between(Residual):
    """A weight of the root's is used behind each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Linear(SIZE, SIZE)

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = self.mid(layer(x))
        return self.out(x)


def once(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model(x * 0.5)


def train(model: nn.Module, computed: Callable[[nn.Module, Tensor], Tensor], *, cache: bool) -> list[float]:
    torch.manual_seed(0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = computed(model, torch.randn(8, SIZE))
        loss.float().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def offloaded(kind: Callable[[], nn.Module], activations: str) -> nn.Module:
    return stronghold.offload(built(kind), device="cpu", window=1, activations=activations)


@pytest.mark.parametrize("activations", WAYS)
@pytest.mark.parametrize(("kind", "computed"), [(Tied, once), (Between, once), (Residual, twice)])
def test_gradients_are_added_up_in_fp32_as_without_the_cache_of_casts(
    kind: Any, computed: Any, activations: str
) -> None:
    plain, cached, model = built(kind), built(kind), offloaded(kind, activations)
    losses = train(model, computed, cache=True)
    assert losses == train(plain, computed, cache=False)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
    torch.testing.assert_close(losses, train(cached, computed, cache=True), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("activations", WAYS)
def test_a_step_within_the_block_is_computed_with_from_then_on(activations: str) -> None:
    plain, model = built(Residual), offloaded(Residual, activations)
    ends = []
    for one, cache in (plain, False), (model, True):
        torch.manual_seed(0)
        optimizer, losses = torch.optim.AdamW(one.parameters(), lr=1e-2), []
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            for _ in range(4):
                loss = one(torch.randn(8, SIZE))
                loss.float().backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        ends.append(losses)
    assert ends[0] == ends[1]
