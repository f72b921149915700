"""Layers that run several times in one backward pass, where each run has accumulators of its own, as on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.unit import data_of, set_data
from stronghold.window import Window
from tests.crossed import crossed
from tests.small import ADAMW, SIZE, Looped, Residual, Shift, assert_close, numbers, pair


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autograd makes new accumulators for a parameter whose data changes its kind, as with a move between devices."""

    def renewing(move: Callable[..., None]) -> Callable[..., None]:
        def anew(self: Window, layer: int, **more: bool) -> None:
            move(self, layer, **more)
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in self.units[layer].parameters:
                    own = data_of(parameter)
                    set_data(parameter, torch.empty(0, dtype=torch.float16))
                    set_data(parameter, own)

        return anew

    for name in ("_bind", "_unbind"):
        monkeypatch.setattr(Window, name, renewing(getattr(Window, name)))
    yield


class Siamese(Residual):
    """Both halves of a batch go through the layers, one after the other, and meet in one loss."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2)
        return (self.features(one) - self.features(other)).square().mean()


class Shifts(Residual):
    """Layers that need nothing of their weights in the backward pass, each used three times."""

    def __init__(self) -> None:
        super().__init__(3, lambda: Shift(SIZE))

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(layer(layer(x).sin()).cos())
        return self.out(x)


MODELS = {"looped": Looped, "siamese": Siamese, "shifts": Shifts}


def trained(build: Callable[[], nn.Module], update: str, **offload: Any) -> tuple[Any, ...]:
    """Returns losses, weights and states after some steps, and the gradients that hooks of two kinds saw."""
    _, model = pair(build, **offload)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, update=update)
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    torch.manual_seed(7)
    losses = []
    for batch in numbers(4):
        loss = model(batch.to(next(iter(model.parameters())).dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, weights, copy.deepcopy(optimizer.state_dict()), sorted(seen, key=lambda item: item[0])


@pytest.mark.filterwarnings("ignore:a training that is saved")
@pytest.mark.parametrize(
    ("model", "update", "dtype", "activations", "window"),
    crossed(
        list(MODELS),
        ["deferred", "in_backward"],
        [torch.float32, torch.bfloat16],
        ["recompute", "keep"],
        [1, 2],
    ),
)
def test_parts_are_summed_and_told_of_as_autograd_does_for_one_accumulator(
    model, update, dtype, activations, window, request
):
    settings = {"window": window, "dtype": dtype, "activations": activations}
    expected = trained(MODELS[model], update, **settings)
    request.getfixturevalue("renewed")
    assert_close(trained(MODELS[model], update, **settings), expected, rtol=0.0, atol=0.0)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_hooks_that_come_late_or_go_early(renewed):
    """One added between the passes hears of the sum; a handle still removes one; one may change the sum."""
    plain, ours = pair(Looped)
    batch = numbers(1)[0]
    seen: dict[str, list] = {"plain": [], "ours": []}
    for kind, model in (("plain", plain), ("ours", ours)):
        weight = model.layers[1].up.weight
        gone = weight.register_hook(lambda g: pytest.fail("it was removed"))
        model.layers[2].up.weight.register_hook(lambda g: g * 3)
        torch.manual_seed(3)
        loss = model(batch)
        gone.remove()
        weight.register_hook(lambda g, kind=kind: seen[kind].append(g.clone()))
        weight.register_post_accumulate_grad_hook(lambda p, kind=kind: seen[kind].append(p.grad.clone()))
        loss.backward()
    assert len(seen["ours"]) == 2
    assert_close(seen["ours"], seen["plain"])
    assert_close(gradients_of(ours), gradients_of(plain))


def test_what_belongs_to_two_passes_is_no_part(renewed):
    """Two forward passes before two backward passes: each ends with its own gradients, and its own calls of hooks."""
    plain, ours = pair(Residual)
    seen: dict[str, list] = {"plain": [], "ours": []}
    for kind, model in (("plain", plain), ("ours", ours)):
        model.layers[1].up.weight.register_hook(lambda g, kind=kind: seen[kind].append(g.clone()))
        torch.manual_seed(3)
        losses = [model(batch) for batch in numbers(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
            seen[kind].append(gradients_of(model))
        (losses[0] + losses[1]).backward()
        seen[kind].append(gradients_of(model))
    assert_close(seen["ours"], seen["plain"])


class Two(nn.Module):
    """The second expert is in the first run alone, or in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.one(x) + self.other(x) if both else self.one(x)


class Routed(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(3))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        for both in (self.first, not self.first):
            for layer in self.layers:
                x = layer(x, both)
        return x.square().mean()


@pytest.mark.parametrize(("update", "first"), [("deferred", True), ("deferred", False), ("in_backward", True)])
def test_a_parameter_that_not_every_run_uses(renewed, update, first):
    plain, ours = pair(lambda: Routed(first))
    expected, optimizer = torch.optim.AdamW(plain.parameters()), stronghold.AdamW(ours.parameters(), update=update)
    calls = {"plain": 0, "ours": 0}
    for kind, model in (("plain", plain), ("ours", ours)):
        model.layers[0].other.weight.register_hook(lambda g, kind=kind: calls.update({kind: calls[kind] + 1}))
    for batch in numbers(3):
        for model, one in ((plain, expected), (ours, optimizer)):
            model(batch).backward()
            one.step()
            one.zero_grad()
    assert calls["ours"] == calls["plain"] == 3
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), msg=lambda m, name=name: f"{name}: {m}")


def test_an_update_that_would_come_before_a_run_is_refused(renewed):
    _, ours = pair(lambda: Routed(False))
    optimizer = stronghold.AdamW(ours.parameters(), update="in_backward")
    with pytest.raises(OffloadedModelError, match=r"layers\.2 runs several times .* use update='deferred'"):
        ours(numbers(1)[0]).backward()
    del optimizer


class Sometimes(torch.autograd.Function):
    """Gives its weight no gradient at times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, give: bool) -> Tensor:
        ctx.give = give
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient.sum(0) if ctx.give else None, None


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor, give: bool) -> Tensor:
        return Sometimes.apply(x, self.weight, give)


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Giving() for _ in range(2))
        self.gives = (True, True)

    def forward(self, x: Tensor) -> Tensor:
        for give in self.gives:
            for layer in self.layers:
                x = layer(x, give)
        return x.square().mean()


@pytest.mark.parametrize("gives", [(True, True), (True, False), (False, True), (False, False)])
def test_a_function_may_give_no_gradient_in_a_run(request, gives):
    plain, ours = pair(Unsteady)
    batch = numbers(1)[0]
    seen: dict[str, list] = {"plain": [], "ours": []}
    for kind, model in (("plain", plain), ("ours", ours)):
        model.layers[0].weight.register_post_accumulate_grad_hook(
            lambda p, kind=kind: seen[kind].append(p.grad if p.grad is None else p.grad.clone())
        )
    for number in range(2):
        for model in (plain, ours):
            model.gives = gives
            model.zero_grad()
            model(batch).backward()
        assert_close(gradients_of(ours), gradients_of(plain))
        if number == 0:
            request.getfixturevalue("renewed")
    assert_close(seen["ours"], seen["plain"])


def test_a_hook_that_autograd_gives_none_instead_of_the_sum_is_refused(renewed):
    plain, ours = pair(Unsteady)
    batch = numbers(1)[0]
    ours.gives = (False, True)  # backward comes to the second first
    handle = ours.layers[0].weight.register_hook(lambda g: None)
    loss = ours(batch)
    with pytest.raises(OffloadedModelError, match=r"gave None for the gradient of a parameter with a hook"):
        loss.backward()
    handle.remove()
    plain.gives = ours.gives
    for model in (plain, ours):
        model.zero_grad()
        model(batch).backward()
    assert_close(gradients_of(ours), gradients_of(plain))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_pass_that_fails_between_the_parts_leaves_none(renewed, update):
    plain, ours = pair(Looped)
    batch = numbers(1)[0]
    expected, optimizer = torch.optim.AdamW(plain.parameters()), stronghold.AdamW(ours.parameters(), update=update)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("the user's own")

    torch.manual_seed(3)
    handle = ours.layers[3].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and handle.remove()
    )
    loss = ours(batch)  # in whose backward pass all second runs have been computed by then, and no first one
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    optimizer.zero_grad()
    for model, one in ((plain, expected), (ours, optimizer)):
        torch.manual_seed(4)
        model(batch).backward()
        one.step()
        one.zero_grad()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), msg=lambda m, name=name: f"{name}: {m}")


def test_losses_that_a_user_keeps_cost_no_more_with_every_step(renewed):
    """``total += loss``: what is kept of graphs that have been freed is forgotten."""
    _, ours = pair(Residual)
    total = torch.zeros(())
    for batch in numbers(6):
        loss = ours(batch)
        loss.backward()
        total = total + loss
    owner = stronghold.unit.unit_of(next(ours.layers[0].parameters())).owner
    assert len(owner.gradients.parts._runs[0]) <= 2


def test_a_layer_that_was_frozen_in_an_earlier_run_has_no_part_in_it(renewed):
    """A loss from before is kept; then the layer is trained."""
    plain, ours = pair(Residual)
    for model in (plain, ours):
        model.layers[1].requires_grad_(False)
        torch.manual_seed(3)
        early = model(numbers(1)[0])
        model.layers[1].requires_grad_(True)
        model(numbers(2)[1]).backward()
        del early
    assert_close(gradients_of(ours), gradients_of(plain))
