"""A model with several of our optimizers: checkpoints hold what all have updated, and load behind all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

import stronghold
from stronghold.optim import Update
from tests.small import ADAMW, Residual, assert_close, numbers, ordinary_loop, pair


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
