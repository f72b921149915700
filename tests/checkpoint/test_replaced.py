"""Saving in place where somebody has removed or replaced what the run has open: refused, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import stronghold
from stronghold.errors import StoreError
from stronghold.formats.lock import LOCK
from stronghold.formats.manifest import NAME
from tests.checkpoint.training import Training
from tests.reference import CASES, differences, snapshot

CASE = CASES["gpt"]


def run(store: Path, **settings: object) -> Training:
    training = Training(CASE.model(), store=store, window=2, **settings)
    training.steps(CASE.batches(1))
    return training


def emptied(store: Path) -> None:
    shutil.rmtree(store)
    store.mkdir()


def replaced(store: Path) -> None:
    shutil.copy(store / "layer-00002.bin", store / "copy")
    (store / "copy").rename(store / "layer-00002.bin")


WAYS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "emptied": emptied,
    "a file removed": lambda store: (store / "layer-00002.bin").unlink(),
    "a file replaced": replaced,
    "the inventory removed": lambda store: (store / "store.json").unlink(),
    "the lock removed": lambda store: (store / LOCK).unlink(),
}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_a_run_is_not_saved_in_a_place_that_is_not_its_own_any_more(tmp_path: Path, change: Callable) -> None:
    training = run(tmp_path / "store")
    change(tmp_path / "store")
    left = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        StoreError, match=r"another program has removed or replaced since\); save into another directory"
    ):
        training.save(tmp_path / "store")
    assert sorted(tmp_path.rglob("*")) == left
    training.save(tmp_path / "elsewhere")
    training.steps(CASE.batches(1))
    other = Training(CASE.model(), window=2)
    other.load(tmp_path / "elsewhere")
    other.steps(CASE.batches(1))
    assert differences(snapshot(other.model, other.optimizer), snapshot(training.model, training.optimizer)) == []


@pytest.mark.parametrize("was_saved", [False, True], ids=["", "a checkpoint before"])
def test_another_run_that_is_there_by_then_keeps_its_checkpoint(tmp_path: Path, was_saved: bool) -> None:
    first = run(tmp_path / "store")
    if was_saved:
        first.save(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    second = run(tmp_path / "store")
    expected = snapshot(second.model, second.optimizer)
    second.save(tmp_path / "store")
    with pytest.raises(StoreError, match="save into another directory"):
        first.save(tmp_path / "store")
    first.steps(CASE.batches(1))  # whose update would have ended its own checkpoint
    assert (tmp_path / "store" / NAME).exists()
    del second
    reopened = Training(CASE.model(), store=tmp_path / "store", weights=os.fspath(tmp_path / "store"), window=2)
    reopened.load(tmp_path / "store")
    assert differences(snapshot(reopened.model, reopened.optimizer), expected) == []


def test_a_checkpoint_ends_with_the_first_change_where_the_lock_alone_is_gone(tmp_path: Path) -> None:
    training = run(tmp_path / "store")
    training.save(tmp_path / "store")
    (tmp_path / "store" / LOCK).unlink()
    training.steps(CASE.batches(1))
    assert not (tmp_path / "store" / NAME).exists()


def test_a_file_that_is_made_late_takes_no_other_run_s_place(tmp_path: Path) -> None:
    """As those of moments are, with the optimizer."""
    first = stronghold.offload(CASE.model(), device="cpu", store=tmp_path / "store", window=2)
    shutil.rmtree(tmp_path / "store")
    second = run(tmp_path / "store")
    expected = snapshot(second.model, second.optimizer)
    second.save(tmp_path / "store")
    with pytest.raises(StoreError, match="another program has removed or replaced"):
        stronghold.AdamW(first.parameters())
    del second
    reopened = Training(CASE.model(), store=tmp_path / "store", weights=os.fspath(tmp_path / "store"), window=2)
    reopened.load(tmp_path / "store")
    assert differences(snapshot(reopened.model, reopened.optimizer), expected) == []
