"""A slot's memory is gone with the layer's computation: outputs are right all the same, and who keeps it is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import stronghold
from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.small import SIZE, Residual, numbers, pair

REFUSED = r"a tensor over the weights of layers\.\d beyond its computation.*got one "


@dataclass
class Output:
    values: torch.Tensor
    bias: torch.Tensor


class Lends(nn.Module):
    """A layer that hands its own weight out, in itself or as a view, in a container of the model's choice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(SIZE, SIZE)
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x, before):
        y = torch.tanh(self.linear(x))
        y = y if before is None else y + before
        if self.kind == "dict":
            return {"values": y, "bias": self.bias[None]}
        if self.kind == "dataclass":
            return Output(y, self.bias.expand(2, SIZE)[:1])
        return y, self.bias if self.kind == "parameter" else self.bias.view(1, -1)


class Lender(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lends(kind) for _ in range(4))

    def forward(self, x):
        bias = None
        for layer in self.layers:
            output = layer(x, bias)
            x, bias = (
                output.values()
                if isinstance(output, dict)
                else ((output.values, output.bias) if isinstance(output, Output) else output)
            )
        return (x * bias).square().mean()


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
@pytest.mark.parametrize("kind", ["view", "parameter", "dict", "dataclass"])
def test_a_layer_may_return_its_own_weights(kind, activations):
    for window in 1, 2, 4:
        plain, model = pair(lambda: Lender(kind), window=window, activations=activations)
        for batch in numbers(2):
            expected, loss = plain(batch), model(batch)
            assert loss.item() == expected.item()
            with torch.no_grad():
                assert model(batch).item() == expected.item()
            expected.backward()
            loss.backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize(("activations", "training"), crossed(["recompute", "keep"], [True, False], together=1))
def test_who_keeps_a_weight_of_the_window_is_told(activations, training):
    model = pair(Residual, activations=activations)[1]
    kept = []
    handle = model.layers[1].up.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
    with torch.set_grad_enabled(training):
        with pytest.raises(OffloadedModelError, match=REFUSED + r"of shape \(32, 16\)"):
            model(numbers(1)[0])
        assert torch._C._is_torch_function_enabled(), "or no parameter would wait for its update any more"
        handle.remove()
        kept.clear()
        model(numbers(1)[0])
        model.layers[1].up.register_forward_hook(lambda module, *_: kept.append(module.weight.clone()))
        model(numbers(1)[0])
    plain = pair(Residual)[0]
    assert torch.equal(kept[0], plain.layers[1].up.weight)


class InContext(torch.autograd.Function):
    """A product that keeps its weight in the context, where autograd's hooks do not see it."""

    saves = False

    @staticmethod
    def forward(ctx, x, weight):
        if InContext.saves:
            ctx.save_for_backward(x, weight)
        else:
            ctx.save_for_backward(x)
            ctx.weight = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, *weight = ctx.saved_tensors
        return gradient @ (weight[0] if weight else ctx.weight.t()), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / SIZE)

    def forward(self, x):
        return x + InContext.apply(x, self.weight)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_function_that_keeps_its_weight_in_the_context_is_refused(activations, monkeypatch):
    """Its backward pass would read another layer's."""
    build = lambda: Residual(block=Custom)  # noqa: E731
    plain, model = pair(build, window=1, activations=activations)
    batch = numbers(1)[0]
    with pytest.raises(OffloadedModelError, match=REFUSED):
        model(batch)
    with torch.no_grad():  # where no graph keeps it
        assert model(batch).item() == plain(batch).item()
    monkeypatch.setattr(InContext, "saves", True)
    for one in plain, model:
        one(batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Differentiates(nn.Linear):
    """A layer that needs its own derivative in its forward pass."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(super().forward(inner)).sum(), inner)
        return x + slope


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_backward_pass_within_a_forward_pass_is_refused(activations):
    model = pair(lambda: Residual(block=lambda: Differentiates(SIZE, SIZE)), activations=activations)[1]
    with pytest.raises(OffloadedModelError, match=r"within its own forward pass \(got one of layers\.0\)"):
        model(numbers(1)[0])


def test_an_object_that_refers_to_itself_keeps_nothing():
    model = pair(Residual)[1]

    def hook(module, args):
        knot = [module.weight.detach()]
        knot.append(knot)

    model.layers[1].up.register_forward_pre_hook(hook)
    model(numbers(1)[0]).backward()


def test_tensors_without_memory_are_passed_over_as_the_error_looks_for_the_one_that_is_kept():
    with FakeTensorMode():
        fake = torch.zeros(3)
    closed = pair(Residual)[1]
    stronghold.close(closed)
    without = [
        *closed.parameters(),
        fake,
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch._to_functional_tensor(fake),
    ]
    torch.func.vmap(lambda one: without.append(one) or one)(torch.zeros(2, 3))
    test_who_keeps_a_weight_of_the_window_is_told("keep", training=True)
    assert len(without) > 4
