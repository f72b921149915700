"""What a layer's second run must not do twice, or leave behind: hooks that it registers, tensors that it is given."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import stronghold
from stronghold.engine.checkpointed import SecondRuns, checkpointed
from tests.gpu import DEVICE, needs_device

HALF = 0.5
CPU = torch.device("cpu")


class Hooking(nn.Module):
    """Registers a hook in its forward pass: ``kind`` says on what."""

    def __init__(self, kind: str, calls: list[int]) -> None:
        super().__init__()
        self.linear, self.kind, self.calls, self.handle = nn.Linear(4, 4), kind, calls, None

    def forward(self, x: Tensor) -> Tensor:
        kind, weight = self.kind, self.linear.weight
        if kind == "input":
            x.register_hook(lambda gradient: HALF * gradient)
        if kind == "node of the input":
            x.grad_fn.register_prehook(lambda gradients: (HALF * gradients[0],))
        if kind == "several":
            torch.autograd.graph.register_multi_grad_hook([x], lambda _: self.calls.append(1))
        if kind == "weight":
            weight.register_hook(lambda gradient: HALF * gradient)
        if kind == "weight, in the place of the last":
            if self.handle is not None:
                self.handle.remove()
            self.handle = weight.register_hook(lambda gradient: HALF * gradient)
        if kind == "accumulated":
            weight.register_post_accumulate_grad_hook(lambda _: self.calls.append(1))
        if kind == "module":
            self.linear.register_full_backward_hook(lambda *_: self.calls.append(1))
        y = torch.tanh(self.linear(x))
        if kind == "own":
            y.register_hook(lambda gradient: HALF * gradient)
        return x + y


class Stack(nn.Module):
    """Three such layers behind a linear one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Hooking(kind, self.calls) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(model: nn.Module, calls: list[int]) -> tuple[list[Tensor], int]:
    """Returns the gradients of three passes, in the order of parameters, and how many calls there were."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model(torch.randn(3, 4)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found, len(calls)


KINDS = ["input", "node of the input", "several", "weight", "weight, in the place of the last", "accumulated", "module"]


@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_hooks_that_a_layer_registers_are_there_once(kind, activations):
    torch.manual_seed(0)
    plain = Stack(kind)
    torch.manual_seed(0)
    model = Stack(kind)
    offloaded = stronghold.offload(model, window=2, device="cpu", activations=activations)
    expected, calls = trained(plain, plain.calls)
    found, called = trained(offloaded, model.calls)
    assert called == calls
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Looking(nn.Module):
    """Tells its input from a leaf and from others, and takes what is left on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = (2.0 if x.is_leaf else 1.0) * x.scale * mask.scale * (3.0 if mask is MASK else 1.0)
        return torch.tanh(self.linear(x)) * scale * x.grad_fn.name().count("Backward")


MASK = torch.ones(4)
MASK.scale = 0.25


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_inputs_look_as_they_did(activations):
    def gradients(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_() * 1
        for layer in model:
            x.scale = 1.5
            x = layer(x, MASK)
        x.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = nn.ModuleList(Looking() for _ in range(3))
    model = copy.deepcopy(plain)
    stronghold.offload(model, window=1, device="cpu", activations=activations)
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(one, other)


class Biased(nn.Module):
    """Adds a bias, which may be the input itself: then it is counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + (2 * x.sin() if bias is x else bias.sin())


@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize("bias", ["the input", "a parameter of the root", "made in inference mode"])
def test_inputs_are_what_they_were(bias, activations):
    def passed(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 12).reshape(3, 4)
        with torch.inference_mode():
            fixed = torch.linspace(0, 1, 4)
        for layer in model.layers:
            x = layer(x, {"the input": x, "a parameter of the root": model.bias}.get(bias, fixed))
        x.square().mean().backward()
        return [parameter.grad for parameter in model.layers.parameters()]

    torch.manual_seed(0)
    plain = nn.Module()
    plain.layers, plain.bias = nn.ModuleList(Biased() for _ in range(3)), nn.Parameter(torch.randn(4))
    model = copy.deepcopy(plain)
    stronghold.offload(model, window=1, device="cpu", activations=activations)
    for one, other in zip(passed(model), passed(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
def test_a_forward_pass_may_have_derivatives_beside_it(activations):
    def derivative(model: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones(2, 4)))).tangent

    torch.manual_seed(0)
    x, plain = torch.randn(2, 4), nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model = stronghold.offload(copy.deepcopy(plain), device="cpu", window=1, activations=activations)
    assert torch.equal(derivative(model), derivative(plain))


def test_what_second_runs_are_told_to_forget_is_computed_again():
    """Of two parts of an output, the gradient of the second comes when another layer lies where this one was."""
    runs, counted = SecondRuns(), []
    slot = torch.full((3,), 2.0, requires_grad=True)  # which the weights of another layer come into

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        counted.append(1)
        with torch.no_grad():
            slot.data = torch.full((3,), 2.0)  # the layer is fetched again
        return x * slot, x.detach() * slot

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            slot.data = torch.full((3,), 7.0)
            runs.forget()
            return gradient

    x = torch.ones(3, requires_grad=True)
    one, other = checkpointed(compute, x.clone(), device=CPU, runs=runs)
    (one_gradient,) = torch.autograd.grad(one.sum(), x, retain_graph=True)
    assert one_gradient.tolist() == [2.0] * 3
    (gradient,) = torch.autograd.grad(Late.apply(one).sum() + other.sum(), x)
    assert gradient.tolist() == [2.0] * 3
    assert len(counted) == 3


class Routed(nn.Module):
    """A layer with a router that looks at its input, without a gradient for that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.router = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.router(x.detach()).softmax(-1).square().sum()
        return x + torch.tanh(self.linear(x)), loss


class Calling(torch.autograd.Function):
    """Computes another layer in the backward pass."""

    @staticmethod
    def forward(ctx, x, other):
        ctx.other = other
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            ctx.other(torch.ones(3, 4))
        return gradient, None


@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_layer_that_is_computed_inside_of_a_backward_pass_leaves_no_weights(window, activations):
    """It came into the slot of the layer that was open, whose second run had saved weights there."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.one(x))
            return x + self.other(y if self.calls is None else Calling.apply(y, self.calls[0]))

    def gradients(model: nn.Module) -> list[Tensor]:
        model[2].calls = [model[0]]
        model(torch.ones(3, 4)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(4)))
    model = stronghold.offload(copy.deepcopy(plain), device="cpu", window=window, activations=activations)
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(one, other)


class Delayed(torch.autograd.Function):
    """Of a busy host: by the time that this gradient comes, the device is layers further."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("activations", ["recompute", "host", "keep"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_gradient_that_comes_late_finds_its_layers_own_weights(window, activations):
    """Its layer's second run had saved weights in a slot where another layer was: that one's were computed with."""

    def gradients(model: nn.Module) -> list[Tensor]:
        x, losses = torch.linspace(-1, 1, 128).reshape(8, 16).to(DEVICE), []
        for layer in model.layers:
            x, loss = layer(x)
            losses.append(Delayed.apply(loss.cpu()))
        (sum(losses) + x.square().mean().cpu()).backward()
        return [parameter.grad.detach().cpu() for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = nn.Module()
    plain.layers = nn.ModuleList(Routed(16) for _ in range(4))
    model = copy.deepcopy(plain)
    stronghold.offload(model, window=window, device=DEVICE, activations=activations)
    for one, other in zip(gradients(model), gradients(plain.to(DEVICE)), strict=True):
        torch.testing.assert_close(one, other)
