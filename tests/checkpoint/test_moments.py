"""Moments that no update can have left are refused before anything changes, wherever they come from."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.errors import CheckpointError
from stronghold.native import Blocks
from tests.checkpoint.test_forged import refused
from tests.checkpoint.training import Training, of_kind
from tests.reference import differences, snapshot

NAME = "layers.1.up.weight"


def spoil(training: Training, key: str, value: float) -> None:
    """Writes by hand what only a hand can have written, into one element or block."""
    moment = training.optimizer.state[training.model.get_parameter(NAME)][key]
    if isinstance(moment, Blocks):
        moment.exponents[-1] = 255
    else:
        moment.view(-1)[-1] = value


def resumable(found: Path, **load: Any) -> None:
    other, kind = of_kind("residual", seed=1, **load)
    other.steps(kind.batches(1))
    refused(found, other)


SPOILT = (("exp_avg", math.nan), ("exp_avg", -math.inf), ("exp_avg_sq", math.nan), ("exp_avg_sq", -1e-9))


@pytest.mark.parametrize(
    ("states", "key", "value"),
    [  # in eight bits one exponent spoils a block, whatever the value
        pytest.param(states, *spoilt, marks=pytest.mark.long if number != 2 and (states, number) != ("fp32", 1) else ())
        for states in ("fp32", "8bit")
        for number, spoilt in enumerate(SPOILT)
    ],
)
def test_a_checkpoint_with_such_moments_is_refused_and_named(
    states: str, key: str, value: float, tmp_path: Path
) -> None:
    training, kind = of_kind("residual", states=states)
    training.steps(kind.batches(1))
    spoil(training, key, value)
    path = training.save(tmp_path / "saved")
    resumable(path, states=states)
    resumable(path)  # eight bits go into fp32
    other, _ = of_kind("residual", states=states)
    with pytest.raises(CheckpointError, match=rf"{NAME}/{key}.* must be .*load another"):
        other.load(path)
    with pytest.raises(CheckpointError, match=rf"not be loaded to the end.*{key} of {NAME}"):
        other.load(path, verify=False)
    stronghold.checkpoint.newest(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("exp_avg", math.nan), ("exp_avg_sq", -1e-9)])
def test_one_of_torchs_own_is_refused_too(key: str, value: float, tmp_path: Path) -> None:
    training, kind = of_kind("residual")
    training.steps(kind.batches(1))
    spoil(training, key, value)
    path = training.save(tmp_path / "saved", format="dcp")
    other, _ = of_kind("residual", seed=1)
    before = snapshot(other.model, other.optimizer)
    with pytest.raises(CheckpointError, match=rf"{key} of {NAME} must be"):
        other.load(path, format="dcp")
    assert differences(snapshot(other.model, other.optimizer), before) == []


@pytest.mark.parametrize("states", [pytest.param("fp32", marks=pytest.mark.long), "8bit"])
def test_a_store_with_such_moments_is_not_reopened(states: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    training, kind = of_kind("residual", states=states, store=store)
    training.steps(kind.batches(1))
    spoil(training, "exp_avg", math.nan)
    with torch.no_grad():
        training.model.get_parameter(NAME).mul_(1)  # a write that is noticed, and with it the other
    path = training.save(store)
    del training
    gc.collect()
    with pytest.raises(CheckpointError, match=rf"{NAME}/exp_avg.* must be"):
        of_kind("residual", states=states, store=store, weights=store)
    resumable(path, states=states)


def test_a_square_that_was_too_large_for_fp32_goes_on_as_it_was(tmp_path: Path) -> None:
    """torch.optim.AdamW leaves such a weight where it is, step for step, and its checkpoint is a good one."""
    training, kind = of_kind("residual")
    batches = kind.batches(3)
    training.steps(batches[:1])
    spoil(training, "exp_avg_sq", math.inf)
    path = training.save(tmp_path / "saved")
    torch.manual_seed(3)
    losses = training.steps(batches[1:])
    other, _ = of_kind("residual", seed=1)
    other.load(path)
    torch.manual_seed(3)
    assert other.steps(batches[1:]) == losses
    moments = other.optimizer.state[other.model.get_parameter(NAME)]["exp_avg_sq"]
    assert moments.view(-1)[-1] == math.inf
