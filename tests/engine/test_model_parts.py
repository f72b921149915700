"""Layers of a part of the model that keep what autograd saves, beside others that run again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import stronghold
from stronghold.engine import engine_of, keep_activations
from tests.crossed import crossed
from tests.small import Block, Residual, assert_close, numbers, pair

runs: Counter[int] = Counter()


class Counted(Block):
    """Counts its runs where a second one is not forgotten."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x):
        runs[self.number] += 1
        return super().forward(x)


class Parts(nn.Module):
    """Two parts of three layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Counted(number) for number in range(3))
        self.second = nn.ModuleList(Counted(number) for number in range(3, 6))

    def forward(self, x):
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize(("kept", "once"), [([], []), (["first"], [0, 1, 2]), (["first.1", "second"], [1, 3, 4, 5])])
def test_layers_that_keep_activations_run_once_and_the_others_twice(kept, once, activations, window):
    def gradients(model):
        torch.manual_seed(7)  # dropout
        loss = model(numbers(1)[0])
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    plain, model = pair(Parts, layers=["first", "second"], activations=activations, window=window)
    keep_activations(engine_of(model), [model.get_submodule(name) for name in kept])
    expected = gradients(plain)
    runs.clear()
    assert_close(gradients(model), expected, rtol=1e-6, atol=1e-8)
    assert runs == {number: 1 if number in once or activations == "keep" else 2 for number in range(6)}


@pytest.mark.parametrize("window", [1, 2])
def test_bits_do_not_depend_on_which_layers_keep_activations(window):
    def trained(kept):
        torch.manual_seed(7)
        _, model = pair(Parts, layers=["first", "second"], window=window)
        keep_activations(engine_of(model), [model.get_submodule(name) for name in kept])
        for batch in numbers(2):
            model(batch).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = trained([])
    for kept in (["first"], ["second"], ["first.0", "first.2", "second.1"]):
        assert all(map(torch.equal, trained(kept), expected))


@pytest.mark.parametrize(
    ("by_layer", "both"),
    crossed([False, True], [([], 0), (["layers"], 4), (["layers.1", "layers.3"], 2)], together=1),
)
def test_compiled_layers_that_keep_activations_are_computed_once_and_change_no_bit(both, by_layer):
    """By torch's own count of matrix products: a layer has two, which its backward pass has not."""
    kept, once = both
    torch._dynamo.reset()
    graphs = {"backend": "aot_eager"}

    def build():
        model = Residual()
        for layer in model.layers if by_layer else ():
            layer.compile(**graphs)
        return model

    def gradients(model):
        torch.manual_seed(7)  # dropout
        loss = model(numbers(1)[0])
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    settings = {} if by_layer else {"compile": graphs}
    _, model = pair(build, window=1, **settings)
    _, as_before = pair(build, window=1, **settings)
    keep_activations(engine_of(model), [model.get_submodule(name) for name in kept])
    gradients(model)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as events:
        got = gradients(model)
    products = sum(event.name == "aten::addmm" for event in events.events())
    assert products == 2 + 2 * (once + 2 * (4 - once))  # two of the root
    assert stronghold.report(model).compiled == 4
    assert all(map(torch.equal, got, gradients(as_before)))
    with torch.no_grad():
        assert torch.equal(model.eval()(numbers(1)[0]), as_before.eval()(numbers(1)[0]))
    torch._dynamo.reset()
