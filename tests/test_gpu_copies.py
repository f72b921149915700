"""A loop's own copies to and from the host that it does not wait for, and its own streams, with a device that is late.

Where the whole model is on the device copies are in the order of the computation, and right.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.gpu import DEVICE, needs_device, sleep
from tests.small import SIZE, Block, Residual

pytestmark = [pytest.mark.gpu, needs_device]

STEPS, LATE_MS = 3, 20
Parameters = Iterable[nn.Parameter]


def values(of: Tensor, step: int) -> Tensor:
    """Returns numbers of the device in the shape of ``of``."""
    return torch.full(of.shape, 0.01 * (step + 1), device=DEVICE)


class Loop:
    """What a loop does between the backward pass and the step; ``seen`` is compared at the end."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = [*parameters]
        self.seen: list[Tensor] = []
        self.held = [parameter.data for parameter in self.parameters]

    def set_gradients(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.grad = values(parameter, step).to(parameter.device, non_blocking=True)

    def set_and_clip_gradients(self, step: int) -> None:
        self.set_gradients(step)
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters, 0.1))

    def copy_gradients(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.grad.copy_(values(parameter, step), non_blocking=True)

    def copy_gradients_by_place(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.grad.copy_(values(parameter, step), True)

    def copy_and_clip_gradients(self, step: int) -> None:
        self.copy_gradients(step)
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters, 0.1))

    def copy_and_clip_gradients_that_were_written(self, step: int) -> None:
        """As where processes' gradients are scaled, added up on the device and clipped."""
        for parameter in self.parameters:
            parameter.grad.mul_(0.5)
        self.copy_and_clip_gradients(step)
        self.copy_gradients(step)
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters, 0.1, foreach=False))

    def copy_and_clip_gradients_by_views(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.grad.view(-1).copy_(values(parameter, step).view(-1), non_blocking=True)
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters, 0.1))

    def copy_and_scale_gradients(self, step: int) -> None:
        self.copy_gradients(step)
        for parameter in self.parameters:
            parameter.grad.mul_(0.5)
            self.seen.append(parameter.grad.clone())

    def read_and_clear_gradients(self, step: int) -> None:
        self.seen += [p.grad.to(DEVICE, non_blocking=True, copy=True) for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad.zero_()

    def copy_weights(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.copy_(values(parameter, step), non_blocking=True)

    def copy_all_weights(self, step: int) -> None:
        torch._foreach_copy_(self.parameters, [values(p, step) for p in self.parameters], non_blocking=True)

    def copy_data(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.data.copy_(values(parameter, step), non_blocking=True)

    def read_weights(self, step: int) -> None:
        self.seen += [parameter.to(DEVICE, non_blocking=True, copy=True) for parameter in self.parameters]

    def read_detached(self, step: int) -> None:
        self.seen += [p.detach().to(DEVICE, non_blocking=True, copy=True) for p in self.parameters]

    def read_held(self, step: int) -> None:
        self.seen += [one.to(DEVICE, non_blocking=True, copy=True) for one in self.held]


DONE: list[Callable[[Loop, int], None]] = [one for name, one in vars(Loop).items() if not name.startswith("_")]
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "ours": (lambda p: stronghold.AdamW(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
}
"""Of the offloaded model, and of the other."""


def trained(model: nn.Module, make: Callable[..., Any], done: Callable[[Loop, int], None]) -> list[Tensor]:
    """Returns losses, what the loop has seen, and the weights."""
    loop = Loop(model.layers.parameters())
    if done is not Loop.read_held:
        loop.held.clear()
    optimizer, losses = make(model.layers.parameters()), []
    for step in range(STEPS):
        loss = model(torch.randn(5, SIZE, generator=torch.Generator().manual_seed(step)).to(DEVICE))
        loss.backward()
        losses.append(loss.detach().cpu())
        sleep(LATE_MS)
        with torch.no_grad():
            done(loop, step)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(one.cpu() for one in loop.seen), *(parameter.detach().cpu() for parameter in loop.parameters)]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("done", DONE, ids=lambda one: one.__name__)
def test_they_are_complete_before_the_host_goes_on(done: Any, name: str, activations: str) -> None:
    torch.manual_seed(0)
    plain = Residual(block=lambda: Block(dropout=0))
    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, window=1, activations=activations)
    ours, theirs = OPTIMIZERS[name]
    expected, found = trained(plain.to(DEVICE), theirs, done), trained(model, ours, done)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def compare_over_steps(name: str, done: Callable[[Loop, int, torch.optim.Optimizer], None]) -> None:
    """Compares what is seen where each step but the backward pass is ``done``, and gradients are cleared in place."""
    torch.manual_seed(0)
    plain, found = Residual(block=lambda: Block(dropout=0)), []
    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, window=1)
    for one, make in zip((model, plain.to(DEVICE)), OPTIMIZERS[name], strict=True):
        loop = Loop(one.layers.parameters())
        loop.held.clear()
        optimizer = make(loop.parameters)
        for step in range(STEPS):
            one(torch.randn(5, SIZE, generator=torch.Generator().manual_seed(step)).to(DEVICE)).backward()
            done(loop, step, optimizer)
            optimizer.zero_grad(set_to_none=False)
        found.append([value.cpu() for value in loop.seen])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_read_before_they_are_cleared_behind_a_step(name: str) -> None:
    def done(loop: Loop, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        sleep(LATE_MS)
        loop.seen += [p.grad.to(DEVICE, non_blocking=True, copy=True) for p in loop.parameters]

    compare_over_steps(name, done)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_views_of_gradients_may_be_kept_over_steps(name: str) -> None:
    """As flat buffers are, which a loop adds up over processes on the device."""

    def done(loop: Loop, step: int, optimizer: torch.optim.Optimizer) -> None:
        loop.held = loop.held or [parameter.grad.view(-1) for parameter in loop.parameters]
        sleep(LATE_MS)
        for view in loop.held:
            view.copy_(values(view, step), non_blocking=True)
        loop.seen.append(nn.utils.clip_grad_norm_(loop.parameters, 0.1).clone())
        optimizer.step()

    compare_over_steps(name, done)


def test_copies_are_complete_before_the_memory_of_a_model_that_is_gone_is() -> None:
    model = stronghold.offload(Residual(), device=DEVICE, window=1)
    expected = [parameter.detach().clone() for parameter in model.layers.parameters()]
    sleep(LATE_MS)
    copies = [parameter.detach().to(DEVICE, non_blocking=True) for parameter in model.layers.parameters()]
    del model
    gc.collect()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(copies, expected, strict=True))


def accumulated(model: nn.Module, side: torch.Stream) -> list[Tensor]:
    """Returns the gradients of passes whose forward pass is in a stream of its own."""
    here, losses = torch.accelerator.current_stream(), []
    inputs = [torch.randn(5, SIZE, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in range(STEPS)]
    for x in inputs:
        side.wait_stream(here)
        with side:
            losses.append(model(x))
        here.wait_stream(side)
        sleep(LATE_MS)
        losses[-1].backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{"resident": 1}, {"resident": 4}, {"activations": "keep"}], ids=str)
def test_gradients_of_a_forward_pass_in_another_stream_are_there_until_they_are_added_up(
    settings: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    plain = Residual(block=lambda: Block(dropout=0))
    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, window=1, **settings)
    side = torch.Stream(DEVICE)
    expected, found = accumulated(plain.to(DEVICE), side), accumulated(model, side)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
