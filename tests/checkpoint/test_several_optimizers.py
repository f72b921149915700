"""A model with several of our optimizers: checkpoints hold what all have updated, and load behind all of them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

import stronghold
from stronghold.optim import Update
from tests.small import ADAMW, Residual, assert_close, assert_same_states, numbers, ordinary_loop, pair

pytestmark = pytest.mark.filterwarnings("ignore:a checkpoint holds the states of the optimizer")


class Both:
    """Two optimizers as one, for a loop: the older one has the first layers, the newer one all else."""

    def __init__(self, kind: Any, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        first = [name for name in named if name.startswith(("layers.0", "layers.1"))]
        self.older = kind([named[name] for name in first], **ADAMW)
        self.newer = kind([p for name, p in named.items() if name not in first], **ADAMW)

    def step(self) -> None:
        self.newer.step()
        self.older.step()

    def zero_grad(self) -> None:
        self.newer.zero_grad()
        self.older.zero_grad()


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the older optimizer's updates take their time, as those of large layers do."""
    kernel = Update.kernel

    def slow(self: Update, *arguments: Any) -> Any:
        time.sleep(0.3 if self.unit.name in ("layers.0", "layers.1") else 0.0)
        return kernel(self, *arguments)

    monkeypatch.setattr(Update, "kernel", slow)


def trained(**placed: Any) -> tuple[nn.Module, Both, nn.Module, Both]:
    """Returns our model and plain PyTorch's, each with its optimizers; of ours, updates are still under way."""
    plain, ours = pair(Residual, **placed)
    expected, both = Both(torch.optim.AdamW, plain), Both(stronghold.AdamW, ours)
    for model, optimizer in ((plain, expected), (ours, both)):
        torch.manual_seed(7)
        ordinary_loop(model, optimizer, numbers(2))
    return ours, both, plain, expected


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_what_is_saved_is_what_all_optimizers_have_updated(form: Any, slow_updates: None, tmp_path: Path) -> None:
    ours, both, plain, _ = trained()
    path = stronghold.checkpoint.save(tmp_path / "saved", ours, both.newer, format=form)
    wanted = weights(plain)
    if form == "dcp":
        found = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
        dcp.load(found, checkpoint_id=path)
        got = found["model"]
    else:
        read = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        got = {name: read[name] for name in wanted}
    assert_close(got, wanted)


def test_what_is_saved_in_place_is_what_all_optimizers_have_updated(slow_updates: None, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ours, both, plain, _ = trained(store=store)
    stronghold.checkpoint.save(store, ours, both.newer)
    stronghold.close(ours)
    again = stronghold.offload(Residual(), device="cpu", window=2, store=store, weights=store)
    stronghold.checkpoint.load(store, again, Both(stronghold.AdamW, again).newer)
    assert_close(weights(again), weights(plain))


def test_what_is_loaded_no_update_of_another_optimizer_changes(slow_updates: None, tmp_path: Path) -> None:
    ours, both, plain, _ = trained()
    path = stronghold.checkpoint.save(tmp_path / "saved", ours, both.newer)
    ordinary_loop(ours, both, numbers(1, seed=5))
    stronghold.checkpoint.load(path, ours, both.newer)
    assert_close(weights(ours), weights(plain))


def assert_goes_on(ours: tuple[nn.Module, Both], plain: tuple[nn.Module, Both], *, steps: int) -> None:
    for model, both in (plain, ours):
        torch.manual_seed(7)
        ordinary_loop(model, both, numbers(steps, seed=5))
    assert_close(weights(ours[0]), weights(plain[0]))
    assert_same_states(ours[1].newer, plain[1].newer)
    assert_same_states(ours[1].older, plain[1].older)


def test_a_reopened_store_gives_another_optimizer_no_moments_of_before(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ours, both, plain, before = trained(store=store)
    with pytest.warns(RuntimeWarning, match="the states of the optimizer that it is saved with, and no others'"):
        stronghold.checkpoint.save(store, ours, both.older)
    stronghold.close(ours)
    again = stronghold.offload(Residual(), device="cpu", window=2, store=store, weights=store)
    both, expected = Both(stronghold.AdamW, again), Both(torch.optim.AdamW, plain)
    stronghold.checkpoint.load(store, again, both.older)
    expected.older.load_state_dict(before.older.state_dict())
    assert_goes_on((again, both), (plain, expected), steps=1)
    stronghold.verify(again)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_other_optimizers_have_is_kept_beside_the_checkpoint(in_place: bool, tmp_path: Path) -> None:
    """As the warning says; all then go on as plain PyTorch does that never stopped."""
    placed = {"store": tmp_path / "store"} if in_place else {}
    path = tmp_path / ("store" if in_place else "saved")
    ours, both, plain, expected = trained(**placed)
    with pytest.warns(RuntimeWarning, match=r"keep the state_dict\(\) of each other one beside") as told:
        stronghold.checkpoint.save(path, ours, both.newer)
    assert told[0].filename == __file__
    torch.save(both.older.state_dict(), tmp_path / "older.pt")
    stronghold.close(ours)
    again = stronghold.offload(Residual(), device="cpu", window=2, **placed, **({"weights": path} if in_place else {}))
    both = Both(stronghold.AdamW, again)
    stronghold.checkpoint.load(path, again, both.newer)
    both.older.load_state_dict(torch.load(tmp_path / "older.pt"))
    assert_goes_on((again, both), (plain, expected), steps=2)


def test_an_optimizer_that_is_gone_or_was_not_used_is_not_told_of(tmp_path: Path) -> None:
    _, ours = pair(Residual)
    optimizer = stronghold.AdamW(ours.parameters(), **ADAMW)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)  # both refer to one another
    ordinary_loop(ours, optimizer, numbers(1))
    del optimizer, scheduler
    optimizer, unused = (stronghold.AdamW(ours.parameters(), **ADAMW) for _ in range(2))
    ordinary_loop(ours, optimizer, numbers(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stronghold.checkpoint.save(tmp_path / "saved", ours, optimizer)
    assert not unused.state_dict()["state"]
