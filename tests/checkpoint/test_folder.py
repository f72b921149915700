"""A folder of checkpoints: which is the newest intact one, which go, and why."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stronghold.checkpoint.folder import make_way, newest, prune, remove, step_path, steps_in
from tests.checkpoint.training import of_kind


@pytest.fixture
def saved(tmp_path: Any) -> Any:
    training, _ = of_kind(window=1)
    for step in (10, 20, 30, 40):
        training.save(step_path(tmp_path, step), extra={"position": step})
        training.optimizer.skipped_steps += 1
    for step in (30, 40):  # their files are linked: damage one, not all
        path = step_path(tmp_path, step)
        shutil.copytree(path, tmp_path / "copy")
        shutil.rmtree(path)
        (tmp_path / "copy").rename(path)
    return tmp_path


def test_the_newest_intact_one_is_found_and_the_others_are_told_with_the_reason(saved: Any) -> None:
    found, skipped = newest(saved)
    assert found is not None and found.extra == {"position": 40}
    assert skipped == {}
    os.truncate(step_path(saved, 40) / "layer-00002.safetensors", 100)
    (step_path(saved, 30) / "manifest.json").unlink()
    (saved / ".step-000050.partial").mkdir()
    (saved / "step-none").mkdir()
    step_path(saved, 60).mkdir()
    found, skipped = newest(saved)
    assert found is not None and found.directory == step_path(saved, 20)
    assert list(skipped) == [step_path(saved, step) for step in (60, 40, 30)]
    reasons = list(skipped.values())
    assert "a directory with a manifest.json" in reasons[0]
    assert "layers.2 must have" in reasons[1] and "got 100" in reasons[1]
    assert "No such file" in reasons[2]


def test_a_folder_without_any_has_none(tmp_path: Any) -> None:
    assert newest(tmp_path / "none") == (None, {})
    assert steps_in(tmp_path / "none") == {}


def test_steps_count_as_numbers(tmp_path: Any) -> None:
    for step in (999_999, 1_000_000, 5):
        step_path(tmp_path, step).mkdir()
    assert list(steps_in(tmp_path)) == [5, 999_999, 1_000_000]


def test_the_oldest_go_and_what_was_left_behind(saved: Any) -> None:
    (saved / ".step-000010.removed").mkdir()
    (saved / ".step-000070.partial").mkdir()
    prune(saved, 40, 3)
    assert sorted(os.listdir(saved)) == ["step-000020", "step-000030", "step-000040"]
    prune(saved, 30, 1)
    assert sorted(os.listdir(saved)) == ["step-000030", "step-000040"], "a later one is another's business"


def test_damaged_ones_go_and_do_not_count(saved: Any) -> None:
    prune(saved, 40, 2, {step_path(saved, 30)})
    assert sorted(os.listdir(saved)) == ["step-000020", "step-000040"]
    found, _ = newest(saved)
    assert found is not None and found.extra == {"position": 40}, "removing one takes no file from another"


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_only_has_the_name_of_one_is_removed_alone(tmp_path: Any, kind: str, left: bool) -> None:
    other = tmp_path / "other"
    (other / "kept").mkdir(parents=True)
    for path in (step_path(tmp_path, 10), *([tmp_path / ".step-000010.removed"] if left else [])):
        if kind == "file":
            path.write_text("notes")
        else:
            path.symlink_to(other if kind == "link" else "nowhere")
    remove(step_path(tmp_path, 10))
    assert os.listdir(tmp_path) == ["other"] and os.listdir(other) == ["kept"]


def test_stray_files_are_left_behind_by_no_pruning(saved: Any) -> None:
    (saved / ".step-000010.removed").write_text("notes")
    (saved / ".step-000070.partial").symlink_to("nowhere")
    prune(saved, 40, 3)
    assert sorted(os.listdir(saved)) == ["step-000020", "step-000030", "step-000040"]


def test_one_is_removed_where_a_process_was_killed_as_it_removed_another(tmp_path: Any) -> None:
    for folder in (step_path(tmp_path, 10), tmp_path / ".step-000010.removed"):
        folder.mkdir()
        (folder / "manifest.json").touch()
    remove(step_path(tmp_path, 10))
    assert not os.listdir(tmp_path)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder of step 10 can be deleted, as where another machine has a file of it open on a network's disk."""
    rmtree = shutil.rmtree

    def refuse(path: Any) -> None:
        if "step-000010" in Path(path).name:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)


def test_what_cannot_be_removed_is_told_and_ends_nothing(saved: Any, held: None) -> None:
    assert prune(saved, 30, 1) == {step_path(saved, 10): "Device or resource busy"}
    left = saved / ".step-000010.removed"
    assert sorted(os.listdir(saved)) == [left.name, "step-000030", "step-000040"]
    assert prune(saved, 40, 1) == {left: "Device or resource busy"}, "it is tried again"
    assert sorted(os.listdir(saved)) == [left.name, "step-000040"]


def test_a_name_is_free_though_what_had_it_cannot_be_removed(tmp_path: Any, held: None) -> None:
    for _ in range(3):
        step_path(tmp_path, 10).mkdir()
        make_way(step_path(tmp_path, 10))
    assert sorted(os.listdir(tmp_path)) == [f".step-000010.{name}removed" for name in ("1.", "2.", "")]
    assert len(prune(tmp_path, 10, 1)) == 3
