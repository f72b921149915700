"""What a layer does to its own parameters by ``.data`` while it computes, which counts no version."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError
from stronghold.unit.own_writes import OwnWrites
from tests.small import Block, Residual, assert_close, numbers, pair

PLACES = [{"window": 1}, {"window": 2, "activations": "keep"}, {"window": 1, "resident": 2}, {}]


def clamps(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.01, 0.01)


def replaces(weight: nn.Parameter) -> None:
    weight.data = weight.detach() / 2


@pytest.mark.parametrize("write", [clamps, replaces])
@pytest.mark.parametrize("place", PLACES)
def test_a_layer_that_writes_its_own_parameters_is_refused(place, write):
    """The write was lost with the slot, and losses were others than the plain model's."""

    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            write(self.up.weight)
            return super().forward(x)

    _, model = pair(lambda: Residual(block=Writing), **place)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OffloadedModelError, match="changed one of its own parameters in place"):
        model(numbers(1)[0])
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


class Reading(Block):
    """Clamps as Gemma 3n does, far beyond what weights come to, and computes with what it has read."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.clamp_(-100, 100)
        return super().forward(x) * self.up.weight.data.abs().mean()


@pytest.mark.parametrize("place", PLACES)
def test_it_may_read_them_and_clamp_what_lies_within(place):
    plain, model = pair(lambda: Residual(block=Reading), **place)
    for one in (plain, model):
        one(numbers(1)[0]).square().sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("place", PLACES)
def test_an_update_is_no_write_of_the_layer_s(place, update):
    plain, model = pair(lambda: Residual(block=Reading), **place)
    optimizers = torch.optim.AdamW(plain.parameters()), stronghold.AdamW(model.parameters(), update=update)
    for batch in numbers(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            one(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("place", PLACES)
def test_what_the_user_writes_behind_a_pass_that_failed_stays(place):
    """It was taken for a write of the layer that was open, put back in that one, and refused."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("the user's")

    def loop(model: nn.Module) -> list[Tensor]:
        x = numbers(1)[0]
        handle = model.layers[1].register_forward_hook(lambda *given: Failing.apply(given[-1]))
        with pytest.raises(ArithmeticError):
            model(x).square().sum().backward()
        handle.remove()
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, model = pair(lambda: Residual(block=Reading), **place)
    assert_close(loop(model), loop(plain))


@pytest.mark.parametrize("place", PLACES)
def test_what_an_interrupted_pass_has_read_is_forgotten(place, monkeypatch):
    plain, model = pair(lambda: Residual(block=Reading), **place)
    x, compare = numbers(1)[0], OwnWrites.compare

    def interrupted(*_, **more):
        monkeypatch.setattr(OwnWrites, "compare", compare)
        raise KeyboardInterrupt

    monkeypatch.setattr(OwnWrites, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    for one in (plain, model):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        one(x).square().sum().backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Adapted(nn.Module):
    """A frozen layer with an adapter, whose values it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)) * self.down.weight.data.abs().mean())


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_no_copy_is_left_of_parameters_beside_the_layer(activations):
    plain = nn.Sequential(*(Adapted() for _ in range(4)))
    model = stronghold.offload(copy.deepcopy(plain), device="cpu", window=1, activations=activations)
    for one in (plain, model):
        one(torch.ones(2, 32)).square().sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        assert found.grad is None or torch.equal(found.grad, expected.grad)
    assert not any(unit.own_writes._read for unit in engine_of(model).units)


class Casting(nn.Module):
    """Has its bias look at its values in the dtype that it computes in, as layers of bitsandbytes do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        return x + F.linear(x, self.linear.weight, self.bias).tanh()


@pytest.mark.parametrize("place", PLACES)
def test_it_may_have_them_look_at_the_same_values_in_another_dtype(place):
    plain = nn.Sequential(*(Casting() for _ in range(4)))
    model = stronghold.offload(copy.deepcopy(plain), device="cpu", **place)
    for one in (plain, model):
        for _ in range(2):
            one(torch.ones(2, 8)).square().sum().backward()
    for expected, found in zip(plain, model, strict=True):
        assert torch.equal(found.linear.weight.grad, expected.linear.weight.grad)
        assert found.bias.dtype == torch.bfloat16
