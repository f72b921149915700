"""A number of layers that keep what autograd saves, the last ones: the others run again in the backward pass."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine.planning.asked import KEPTS, kepts
from tests.small import ADAMW, Block, Residual, follow, numbers, pair

AGAIN: Counter[int] = Counter()
"""How often each layer has run in a backward pass, by its id: what it had in an attribute would be put back."""


class Counting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        AGAIN[id(self)] += torch._C._current_graph_task_id() != -1
        return super().forward(x)


@pytest.mark.parametrize("settings", [{"window": 1}, {"window": 2, "resident": 1}, {"window": 4, "store": True}])
@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_the_last_layers_keep_and_the_others_run_again_as_the_plain_model_trains(kept, settings, tmp_path):
    settings = {**settings, "store": tmp_path} if "store" in settings else settings
    AGAIN.clear()
    model, _ = follow(lambda: Residual(block=Counting), numbers(3), **settings, activations=kept)
    assert [AGAIN[id(layer)] for layer in model.layers] == [3] * (4 - kept) + [0] * kept


@pytest.mark.parametrize("more", [{}, {"dtype": torch.bfloat16}, {"micro_batch": 1}])
def test_how_many_keep_changes_no_bit(more):
    def trained(activations: int | str) -> tuple[list[float], list[torch.Tensor]]:
        model = pair(lambda: Residual(block=lambda: Block(dropout=0)), activations=activations, **more)[1]
        optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
        losses = []
        for batch in numbers(4):
            loss = model(batch.to(model.into.weight.dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    losses, weights = trained("recompute")
    for activations in (1, 2, 3, "keep"):
        got = trained(activations)
        assert got[0] == losses
        assert all(map(torch.equal, got[1], weights))


@pytest.mark.parametrize("asked", [-1, True, 1.5, "some"])
def test_what_is_no_number_of_layers_is_refused(asked):
    with pytest.raises(ValueError, match=r"activations must be 'recompute', .* a number of layers"):
        stronghold.offload(Residual(), device="cpu", activations=asked)


def test_more_than_there_are_is_refused_before_anything_changes():
    model = Residual()
    with pytest.raises(ValueError, match=r"no more layers than there are, 4, .*\(got 5\); pass 'keep' for all"):
        stronghold.offload(model, device="cpu", activations=5)
    assert type(model.into.weight) is nn.Parameter


def test_a_plan_may_have_any_number_of_few_layers_and_about_32_of_many():
    assert [*kepts(None, 5)] == [0, 1, 2, 3, 4, 5]
    many = [*kepts(None, 100)]
    assert (many[0], many[-1]) == (0, 100)
    assert KEPTS / 2 < len(many) <= KEPTS + 1
    assert max(b - a for a, b in itertools.pairwise(many)) <= 4
    assert [*kepts(None, 5, may_keep=False)] == [0]
    assert [*kepts(2, 5, may_keep=False, resident=5)] == [2]
    for resident in (None, 4):
        with pytest.raises(ValueError, match=rf"activations=2 would hold, unpacked, .*\(got packed .*={resident}\)"):
            kepts(2, 5, may_keep=False, resident=resident)
    assert [[*kepts(asked, 5)] for asked in (3, "keep", "recompute", "host")] == [[3], [5], [0], [0]]
