"""A loop goes on after Ctrl-C, wherever that came: exactly, or with an error that says what to load."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError
from tests.ctrl_c import CtrlC
from tests.gpu import DEVICE, needs_device
from tests.small import SIZE, Residual

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="reads tables that Python's code has from 3.11 on")

STEPS = 4
INTERRUPTED = 1
"""The step that Ctrl-C comes in."""

State = tuple[list[float], list[Tensor]]


class Case(NamedTuple):
    """What is under way when Ctrl-C comes, the rooms of the package that it comes in, and how far apart the places."""

    doing: str
    rooms: tuple[str, ...]
    apart: int
    settings: dict[str, Any]
    update: str = "deferred"
    on_disk: bool = False


CASES = {
    "forward": Case("forward", ("window/", "schedule.py", "unit/users.py"), 9, {"activations": "recompute"}),
    "inputs-down": Case("forward", ("window/activations.py", "window/shelves.py"), 3, {"activations": "host"}),
    "backward": Case(
        "backward", ("window/window.py", "window/gradients.py", "window/grad_offload.py", "engine/engine.py"), 7, {}
    ),
    "inputs-up": Case("backward", ("window/activations.py", "window/shelves.py"), 2, {"activations": "host"}),
    "in-backward": Case("backward", ("engine/updates.py", "window/window.py", "store/"), 11, {}, "in_backward"),
    "step": Case("step", ("engine/updates.py", "device/", "window/window.py"), 17, {}),
    "step-disk": Case("step", ("engine/updates.py", "device/", "store/"), 37, {}, on_disk=True),
    "evaluation": Case("evaluation", ("window/", "device/"), 11, {}),
}
ON_A_DEVICE = {
    "forward-disk": Case("forward", ("window/", "store/", "engine/root.py"), 37, {"activations": "host"}, on_disk=True),
    "step": Case("step", ("engine/", "window/", "device/"), 23, {}),
    "step-disk": Case("step", ("engine/updates.py", "window/", "store/"), 97, {}, on_disk=True),
}
"""Without a backward pass: it has a thread of its own there, and Ctrl-C comes to the one that waits for it."""


def inputs(step: int) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 + step))


class Loop:
    """A model with its optimizer, and what a user would save of both."""

    def __init__(self, base: nn.Module, case: Case, device: str, store: Path | None) -> None:
        model = copy.deepcopy(base)
        if store is not None:
            self.model = stronghold.offload(model, device=device, window=2, store=store, **case.settings)
        else:
            self.model = stronghold.offload(model, device=device, window=2, **case.settings)
        self.optimizer = stronghold.AdamW(self.model.parameters(), lr=1e-2, update=case.update)
        self.device = device
        self.losses: list[float] = []

    def loss(self, step: int) -> Tensor:
        return self.model(inputs(step).to(self.device))

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def values(self) -> list[Tensor]:
        return [parameter.detach().cpu().clone() for parameter in self.model.parameters()]

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        values = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return values, copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


@contextmanager
def opened(base: nn.Module, case: Case, device: str, directory: Path) -> Iterator[Loop]:
    loop = Loop(base, case, device, directory if case.on_disk else None)
    way_down = engine_of(loop.model).gradients.grad_offload
    try:
        yield loop
        assert len(way_down.slots) == len(way_down._staging) == 2
    finally:
        stronghold.close(loop.model)


def interrupt(loop: Loop, case: Case, ctrl_c: CtrlC) -> None:
    doing = {
        "forward": lambda: loop.loss(INTERRUPTED),
        "evaluation": torch.no_grad()(lambda: loop.loss(INTERRUPTED)),
    }.get(case.doing)
    if doing is None:
        loss = loop.loss(INTERRUPTED)
        doing = loss.backward
        if case.doing == "step":
            loss.backward()
            doing = loop.optimizer.step
    with ctrl_c.comes():
        doing()


def goes_on_after_a_pass(base: nn.Module, case: Case, ctrl_c: CtrlC, device: str, directory: Path) -> State:
    """Computes all steps, of which one is taken again behind a pass of it that was broken off."""
    with opened(base, case, device, directory) as loop:
        saved = loop.saved()
        for step in range(STEPS):
            if step == INTERRUPTED:
                interrupt(loop, case, ctrl_c)
                loop.optimizer.zero_grad()
            try:
                loop.step(step)
            except OffloadedModelError as error:  # what was updated by then cannot be done again
                assert case.update == "in_backward" and "load the last checkpoint" in str(error)
                loop.load(saved)
                loop.step(step)
            saved = saved if step else loop.saved()
        return loop.losses, loop.values()


def goes_on_after_a_step(
    base: nn.Module, case: Case, ctrl_c: CtrlC, device: str, directory: Path
) -> tuple[State, State]:
    """Takes two steps behind one that was broken off; and the same from what there was, in another model."""
    found = []
    with opened(base, case, device, directory / "one") as loop:
        loop.step(0)
        interrupt(loop, case, ctrl_c)
        saved = loop.saved()
        loop.optimizer.zero_grad()
        loop.losses.clear()
        loop.step(2)
        loop.step(3)
        found.append((loop.losses, loop.values()))
    with opened(base, case, device, directory / "other") as loop:
        loop.load(saved)
        loop.step(2)
        loop.step(3)
        found.append((loop.losses, loop.values()))
    return found[0], found[1]


def check(case: Case, device: str, directory: Path) -> None:
    torch.manual_seed(0)
    base = Residual()
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    everywhere = CtrlC(sys.maxsize, case.rooms)
    run: Callable[..., Any] = goes_on_after_a_step if case.doing == "step" else goes_on_after_a_pass
    whole = run(base, case, everywhere, device, directory / "whole")
    assert everywhere.passed > 10 * case.apart
    came = set()
    for number in range(0, everywhere.passed, case.apart):
        ctrl_c = CtrlC(number, case.rooms)
        found = run(base, case, ctrl_c, device, directory / str(number))
        (losses, values), (expected, expected_values) = found if case.doing == "step" else (found, whole)
        assert losses == expected, ctrl_c.place
        assert all(map(torch.equal, values, expected_values)), ctrl_c.place
        came.add(ctrl_c.place)
    assert len(came) > 5


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loop_goes_on_exactly_behind_ctrl_c(case, tmp_path):
    check(case, "cpu", tmp_path)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("case", ON_A_DEVICE.values(), ids=ON_A_DEVICE)
def test_a_loop_on_a_device_goes_on_exactly_behind_ctrl_c(case, tmp_path):
    check(case, DEVICE, tmp_path)
