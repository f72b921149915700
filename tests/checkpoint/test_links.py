"""A checkpoint costs a copy of what changed: the rest is linked, and never what only looks unchanged."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stronghold
from tests.checkpoint.training import Training, of_kind
from tests.crossed import crossed
from tests.reference import differences, snapshot

FROZEN = {"layer-00000.safetensors", "layer-00002.safetensors", "root-00000.safetensors", "root-00001.safetensors"}
STORES = pytest.mark.parametrize("store", ["ram", "disk"])


def start(tmp_path: Any, store: str = "ram", **settings: Any) -> tuple[Training, Any]:
    where = store if store == "ram" else str(tmp_path / "store")
    training, kind = of_kind("frozen", store=where, **settings)
    training.steps(kind.batches(1))
    return training, kind


def linked(one: Any, other: Any) -> set[str]:
    """Names the files that two checkpoints share."""
    names = set(os.listdir(one)) & set(os.listdir(other))
    return {name for name in names if (one / name).stat().st_ino == (other / name).stat().st_ino}


@pytest.mark.parametrize(("store", "dtype"), crossed(("ram", "disk"), (torch.float32, torch.bfloat16), together=1))
def test_units_that_did_not_change_are_the_same_file(store: str, dtype: torch.dtype, tmp_path: Any) -> None:
    training, kind = start(tmp_path, store, dtype=dtype)
    one = training.save(tmp_path / "a")
    training.steps(kind.batches(2))
    two = training.save(tmp_path / "b")
    assert linked(one, two) == FROZEN
    assert all((two / name).stat().st_nlink == 2 for name in FROZEN)
    three = training.save(tmp_path / "c")
    assert linked(two, three) == set(os.listdir(two)) - {"manifest.json"}
    other, _ = of_kind("frozen", seed=1, dtype=dtype)
    other.load(three)
    assert differences(snapshot(other.model, other.optimizer), snapshot(training.model, training.optimizer)) == []


@STORES
def test_a_resumed_process_links_to_what_it_loaded(store: str, tmp_path: Any) -> None:
    training, kind = start(tmp_path, store)
    one = training.save(tmp_path / "a")
    other, _ = of_kind("frozen", seed=1, store="ram" if store == "ram" else str(tmp_path / "other"))
    other.load(one)
    other.steps(kind.batches(1))
    assert linked(one, other.save(tmp_path / "b")) == FROZEN


def test_what_was_loaded_in_another_format_is_written(tmp_path: Any) -> None:
    training, kind = start(tmp_path)
    one = training.save(tmp_path / "a")
    other, _ = of_kind("frozen", seed=1, dtype=torch.bfloat16)
    other.load(one)
    assert linked(one, other.save(tmp_path / "b")) == set()
    del kind


def write(training: Training) -> None:
    with torch.no_grad():
        training.model.layers[0].up.weight.add_(1.0)


def write_unseen(training: Training) -> None:
    training.model.layers[0].up.weight.data.add_(1.0)


def write_numpy(training: Training) -> None:
    training.model.layers[0].up.weight.detach().numpy()[0, 0] = 5.0


def load_state(training: Training) -> None:
    state = {name: value.clone() + 1 for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "between", "store"),
    crossed((write, write_unseen, write_numpy, load_state), (False, True), ("ram", "disk"), together=1),
)
def test_what_the_user_wrote_into_a_frozen_unit_is_written(
    change: Callable[[Training], None], between: bool, store: str, tmp_path: Any
) -> None:
    training, kind = start(tmp_path, store)
    one = training.save(tmp_path / "a")
    change(training)
    if between:
        training.model(kind.batches(1)[0])
    two = training.save(tmp_path / "b")
    assert "layer-00000.safetensors" not in linked(one, two)
    other, _ = of_kind("frozen", seed=1)
    other.load(two)
    assert differences(snapshot(other.model, other.optimizer), snapshot(training.model, training.optimizer)) == []


def test_a_write_into_a_moment_and_another_optimizer_are_noticed(tmp_path: Any) -> None:
    training, _ = start(tmp_path)
    one = training.save(tmp_path / "a")
    trained = training.model.layers[1].up.weight
    training.optimizer.state[trained]["exp_avg"].add_(1.0)
    two = training.save(tmp_path / "b")
    assert "layer-00001.safetensors" not in linked(one, two)
    groups = [{**g, "params": list(g["params"])} for g in training.optimizer.param_groups]
    saved = [two]
    for factor in (2.0, 3.0):  # both optimizers have loaded a state once, of the same step
        state = copy.deepcopy(training.optimizer.state_dict())
        for moments in state["state"].values():
            moments["exp_avg"] *= factor
        training.optimizer = stronghold.AdamW(groups, lr=1e-2)
        training.optimizer.load_state_dict(state)
        saved.append(training.save(tmp_path / f"c{factor}"))
        assert "layer-00001.safetensors" not in linked(*saved[-2:])


def test_what_was_loaded_over_a_saved_unit_is_noticed(tmp_path: Any) -> None:
    """Of the same step and in another format, so that there is no newer file to link to."""
    training, kind = start(tmp_path)
    one = training.save(tmp_path / "a")
    other, _ = of_kind("frozen", seed=1, dtype=torch.bfloat16)
    other.steps(kind.batches(1))
    training.load(other.save(tmp_path / "b"))
    two = training.save(tmp_path / "c")  # before anybody looks at a parameter, and might have written it
    assert linked(one, two) == set()
    expected = snapshot(training.model, training.optimizer)
    training.load(two)
    assert differences(snapshot(training.model, training.optimizer), expected) == []


def test_another_parent_a_changed_file_and_no_links_mean_a_copy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = start(tmp_path)
    one = training.save(tmp_path / "a")
    assert linked(one, training.save(tmp_path / "elsewhere" / "a")) == set()
    two = training.save(tmp_path / "elsewhere" / "b")
    name = "layer-00001.safetensors"
    os.utime(two / name, ns=(1, 1))
    three = training.save(tmp_path / "elsewhere" / "c")
    assert linked(two, three) == set(os.listdir(two)) - {"manifest.json", name}

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    four = training.save(tmp_path / "elsewhere" / "d")
    assert linked(three, four) == set()
    other, _ = of_kind("frozen", seed=1)
    other.load(four)
    assert differences(snapshot(other.model, other.optimizer), snapshot(training.model, training.optimizer)) == []
