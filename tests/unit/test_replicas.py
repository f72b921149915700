"""What replicas train together none of them writes by itself: weights and gradients, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.errors import OffloadedModelError, ParallelError
from stronghold.unit import Replicas
from tests.delayed import Apart
from tests.replicas import in_threads
from tests.small import SIZE, Block, Residual

PLACES: dict[str, dict[str, Any]] = {
    "all layers on the device": {"resident": 4},
    "no layer on the device": {"window": 1},
    "memory of its own": {"window": 2, "device": Apart, "device_memory": 10**9},
    "the root's copy": {"window": 2, "device": Apart, "resident": 1},
}
places = pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)


def built() -> Residual:
    torch.manual_seed(0)
    return Residual(block=lambda: Block(dropout=0.0))


def in_replicas(settings: dict[str, Any], action: Callable[[nn.Module, Replicas], Any]) -> list[Any]:
    models = [built() for _ in range(2)]

    def run(one: Replicas) -> Any:
        device = settings.get("device", lambda: "cpu")()
        model = offload_shared(models[one.rank], one, **{**settings, "device": device})
        copies = model.parameters() if one.rank else ()
        engine_of(model).join(one.everyone, shared={}, copies=copies, model="Residual", passes=1, here=2)
        return action(model, one)

    return in_threads(2, run)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


@places
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("part", ["", "layers.0", "out"])
def test_gradients_are_not_clipped_by_the_norm_of_one(settings: dict[str, Any], optimizer: bool, part: str) -> None:
    """It was that of each replica's own gradients, before their mean: another in each, and of no step of PyTorch's."""

    def run(model: nn.Module, one: Replicas) -> None:
        ours = stronghold.AdamW(model.parameters()) if optimizer else None
        for _ in range(2):  # a first gradient, and a sum
            model(batch(one.rank, 0)).backward()
            with pytest.raises(OffloadedModelError, match=r"2 replicas have.*clip by its max_grad_norm"):
                nn.utils.clip_grad_norm_(model.get_submodule(part).parameters(), 0.01)
        assert ours is None or not ours.state

    in_replicas(settings, run)


@places
def test_another_optimizer_steps_none_of_them(settings: dict[str, Any]) -> None:
    """Each replica's weights went their own way, by the gradients of its own batch."""

    def run(model: nn.Module, one: Replicas) -> None:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model(batch(one.rank, 0)).backward()
        with pytest.raises(OffloadedModelError, match=r"2 replicas have.*update by stronghold\.AdamW"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(OffloadedModelError, match=r"2 replicas have.*change weights before"):
            nn.init.normal_(model.out.weight)
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())

    in_replicas(settings, run)


def trained_by_plain_pytorch(steps: int) -> nn.Module:
    """Returns the model behind so many steps with the mean of both replicas' gradients, clipped."""
    plain = built()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(steps):
        for rank in range(2):
            (plain(batch(rank, step)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return plain


def assert_trained_as(plain: nn.Module, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    for name, parameter in plain.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_replicas_that_would_update_with_other_settings_are_refused() -> None:
    """Each updated its share of every layer with its own rate, as ReduceLROnPlateau's over its own part had set it."""
    plain = trained_by_plain_pytorch(steps=2)

    def run(model: nn.Module, one: Replicas) -> dict[str, torch.Tensor]:
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.01)
        model(batch(one.rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(one.rank, 1)).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + one.rank)
        with pytest.raises(ParallelError, match=r"got lr of group 0 0.01 in replica 0 and 0.02 in replica 1\)"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64) if one.rank else 1e-2  # the same
        optimizer.max_grad_norm = None if one.rank else 0.01
        with pytest.raises(ParallelError, match=r"got max_grad_norm 0.01 in replica 0 and None in replica 1\)"):
            optimizer.step()
        optimizer.max_grad_norm = 0.01
        optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    assert_trained_as(plain, *in_replicas({"window": 1}, run))


def test_own_gradients_that_a_loop_sets_are_refused_and_common_ones_trained_with() -> None:
    """Each replica updated its share of every layer with its own, and the model was no replica's."""
    plain = trained_by_plain_pytorch(steps=1)

    def run(model: nn.Module, one: Replicas) -> dict[str, torch.Tensor]:
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.01)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(model(batch(one.rank, 0)), list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        with pytest.raises(ParallelError, match=r"the same ones where a loop sets p.grad of a layer itself"):
            optimizer.step()
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        optimizer.zero_grad()
        model(batch(one.rank, 0)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    assert_trained_as(plain, *in_replicas({"window": 1}, run))


def test_a_hook_of_one_replica_looks_at_sums() -> None:
    """As the first one logs norms."""
    plain = built()
    for rank, number in ((rank, number) for number in range(2) for rank in range(2)):
        (plain(batch(rank, number)) / 2).backward()

    def run(model: nn.Module, one: Replicas) -> dict[str, torch.Tensor]:
        if one.rank == 0:
            model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        for number in range(2):
            model(batch(one.rank, number)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if name.startswith("layers")}

    for gradients in in_replicas({"window": 1}, run):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


class MayLeaveOut(Block):
    """A layer that uses its norm, or does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x) if self.uses_norm else x))

    uses_norm = True


def test_a_parameter_of_a_layer_that_one_replica_does_not_use_is_told_of() -> None:
    """The sums of squares had other lengths then, for which a process group ends its process.

    What has come is published by none: sums of one replica's gradients with another's of other parameters.
    """
    models = [Residual(block=lambda: MayLeaveOut(dropout=0.0)) for _ in range(2)]

    def run(one: Replicas) -> None:
        model = offload_shared(models[one.rank], one, device="cpu", window=1)
        engine_of(model).join(one.everyone, shared={}, copies=(), model="Residual", passes=1, here=2)
        model.layers[1].uses_norm = one.rank == 0
        with pytest.raises(ParallelError, match=r"have gradients for the same parameters"):
            model(batch(one.rank, 0)).backward()
        one.everyone.barrier()
        assert all(parameter.grad is None for parameter in model.layers.parameters())

    in_threads(2, run)


def test_replicas_at_different_places_are_not_told_of_their_settings() -> None:
    """One is at its step, and the other in a further backward pass, where nobody has asked for settings."""

    def run(model: nn.Module, one: Replicas) -> None:
        with pytest.raises(ParallelError, match=r"must compute the same layers in the same order"):
            one.agree([("a layer", (0,))], settings=None if one.rank else {"lr of group 0": 1e-2})

    in_replicas({"window": 1}, run)


@places
def test_they_train_as_plain_pytorch_does_with_the_mean(settings: dict[str, Any]) -> None:
    """Clipped by the norm of the mean; the gradients are looked at in between."""
    plain = trained_by_plain_pytorch(steps=3)

    def run(model: nn.Module, one: Replicas) -> dict[str, torch.Tensor]:
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.01)
        for step in range(3):
            model(batch(one.rank, step)).backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    first, second = in_replicas(settings, run)
    for name, parameter in plain.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], parameter.detach(), rtol=1e-4, atol=1e-5)
