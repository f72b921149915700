"""Loss scaling, and rates on the device: what the host scales by has arrived there, though the device is behind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.gpu import DEVICE, needs_device, sleep
from tests.small import SIZE, Block, Residual

pytestmark = [pytest.mark.gpu, needs_device]

SCALE, STEPS, LATE_MS = 1024.0, 4, 20
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
    "fused": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "ours": (lambda p: stronghold.AdamW(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
}
"""Of the offloaded model, and of the other."""


def batch(step: int) -> Tensor:
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def pair(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """Returns a model that is wholly on the device, and its copy that is offloaded."""
    torch.manual_seed(0)
    model = Residual(block=lambda: Block(dropout=0))
    plain = copy.deepcopy(model).to(DEVICE)
    return plain, stronghold.offload(model, device=DEVICE, window=1, **settings)


def scaled(
    model: nn.Module,
    make: Callable[..., Any],
    *,
    infinite_at: int,
    unscales: bool,
    half: bool = False,
    of_root: bool = False,
) -> list[Tensor]:
    """Returns losses, scales and gradients of some steps, in one of which they are not finite, and the weights."""
    optimizer = make(model.parameters() if of_root else model.layers.parameters())
    kind = torch.device(DEVICE).type
    scaler, seen = torch.amp.GradScaler(kind, init_scale=SCALE), []
    for step in range(STEPS):
        with torch.autocast(kind, torch.float16, enabled=half):
            loss = model.features(batch(step)).float().square().mean()
        scaler.scale(loss * (math.inf if step == infinite_at else 1)).backward()
        sleep(LATE_MS)
        if unscales:
            scaler.unscale_(optimizer)
            seen += [parameter.grad.cpu() for parameter in model.layers.parameters() if step != infinite_at]
        scaler.step(optimizer)
        scaler.update()
        seen += [loss.detach().cpu(), torch.tensor(scaler.get_scale())]
        optimizer.zero_grad()
    return seen + [parameter.detach().cpu() for parameter in model.layers.parameters()]


@pytest.mark.parametrize("infinite_at", [STEPS, 1], ids=["finite", "infinite once"])
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaler_does_what_it_does_for_a_model_on_the_device(name: str, unscales: bool, infinite_at: int) -> None:
    ours, theirs = OPTIMIZERS[name]
    plain, model = pair()
    expected = scaled(plain, theirs, infinite_at=infinite_at, unscales=unscales)
    assert (torch.tensor(SCALE / 2) in [one for one in expected if not one.ndim]) == (infinite_at < STEPS)
    found = scaled(model, ours, infinite_at=infinite_at, unscales=unscales)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_skipped_where_gradients_are_infinite_on_host_and_device(name: str, unscales: bool) -> None:
    ours, theirs = OPTIMIZERS[name]
    plain, model = pair()
    expected = scaled(plain, theirs, infinite_at=1, unscales=unscales, of_root=True)
    found = scaled(model, ours, infinite_at=1, unscales=unscales, of_root=True)
    assert all(one.isfinite().all() for one in found[-4:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_does_so_under_autocast_to_float16(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    plain, model = pair()
    expected = scaled(plain, theirs, infinite_at=1, unscales=True, half=True)
    found = scaled(model, ours, infinite_at=1, unscales=True, half=True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"activations": "keep"}], ids=str)
def test_a_rate_on_the_device_is_the_one_that_the_loop_has_set(settings: dict[str, Any]) -> None:
    losses = []
    for model in pair(**settings):
        rate = torch.tensor(0.1, device=DEVICE)
        fused = next(model.layers.parameters()).device.type == "cpu"  # the accelerator in software has no such kernel
        optimizer = torch.optim.AdamW(model.layers.parameters(), lr=rate if fused else 0.1, fused=fused)
        losses.append([])
        for step in range(STEPS):
            loss = model.features(batch(step)).square().mean()
            loss.backward()
            sleep(LATE_MS)
            rate.mul_(0.5)
            optimizer.param_groups[0]["lr"] = rate if fused else rate.item()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
