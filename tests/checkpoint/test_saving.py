"""What a checkpoint is on disk, how it gets there, and what is left when the disk refuses."""

from __future__ import annotations

import errno
import math
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stronghold
from stronghold.checkpoint import folder
from stronghold.engine import engine_of, offload_shared
from stronghold.unit import Replicas, unit_of
from tests.checkpoint.training import of_kind
from tests.replicas import in_threads
from tests.small import Residual


def test_files_are_safetensors_with_the_masters_under_the_parameters_names(tmp_path: Any) -> None:
    training, kind = of_kind("stateful")
    training.steps(kind.batches(2))
    path = training.save(tmp_path / "run" / "saved")
    assert path == tmp_path / "run" / "saved"
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    for name, value in training.model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    names = dict(training.model.named_parameters())
    state = training.optimizer.state[names["layers.2.linear.weight"]]
    assert torch.equal(tensors["layers.2.linear.weight/exp_avg_sq"], state["exp_avg_sq"])
    assert sorted(os.listdir(tmp_path / "run")) == ["saved"]


def test_bf16_units_hold_weight_and_remainder(tmp_path: Any) -> None:
    training, kind = of_kind(dtype=torch.bfloat16, states="8bit")
    training.steps(kind.batches(1))
    tensors = load_file(training.save(tmp_path / "saved") / "layer-00003.safetensors")
    parameter = training.model.layers[3].up.weight
    unit = unit_of(parameter)
    assert unit is not None
    whole = (tensors["layers.3.up.weight"].view(torch.int16).int() << 16) + tensors["layers.3.up.weight/remainder"]
    assert torch.equal(whole.view(torch.float32), unit.master(parameter.__dict__["_index"]))
    assert tensors["layers.3.up.weight/exp_avg"].dtype is torch.uint8
    assert tensors["layers.3.up.weight/exp_avg/exponents"].numel() == -(-parameter.numel() // 64)


def test_the_manifest_comes_last_and_everything_is_synced_before_the_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = of_kind()
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def noted(file: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def renamed(source: Any, target: Any, **more: Any) -> None:
        events.append(("rename", os.fspath(target)))
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    path = training.save(tmp_path / "run" / "all" / "saved")
    assert events[:2] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "run"))], "the new directories' own names"
    del events[:2]
    partial = str(path.parent / ".saved.partial")
    files = {name for name in os.listdir(path) if name != "manifest.json"}
    assert {name for _, name in events[: len(files)]} == {f"{partial}/{name}" for name in files}
    assert events[len(files) :] == [
        ("sync", f"{partial}/manifest.json.partial"),
        ("rename", f"{partial}/manifest.json"),
        ("sync", partial),
        ("rename", str(path)),
        ("sync", str(path.parent)),
    ]


@pytest.mark.parametrize("call", [0, 1, 7, -2, -1])
def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(
    call: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, kind = of_kind()
    training.save(tmp_path / "step-1")
    training.steps(kind.batches(1))
    write, calls = os.pwrite, [0]

    def counted(file: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    limit = 10**9
    monkeypatch.setattr(os, "pwrite", counted)
    training.save(tmp_path / "step-2")
    training.steps(kind.batches(1))
    limit, calls[0] = (call if call >= 0 else calls[0] + call), 0
    with pytest.raises(OSError, match=r"No space left.*\.step-3\.partial/(layer|root|manifest)") as caught:
        training.save(tmp_path / "step-3")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    found, skipped = folder.newest(tmp_path)
    assert found is not None and found.directory.name == "step-2" and not skipped
    limit = 10**9
    training.save(tmp_path / "step-3")  # and it can go on when there is room again


def test_what_a_killed_process_left_is_replaced(tmp_path: Any) -> None:
    training, _ = of_kind()
    (tmp_path / ".saved.partial").mkdir()
    (tmp_path / ".saved.partial" / "layer-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".saved.partial" / "foreign").write_bytes(b"half")
    path = training.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert "foreign" not in os.listdir(path)


def test_a_directory_in_use_is_refused_and_an_empty_one_taken(tmp_path: Any) -> None:
    training, _ = of_kind()
    (tmp_path / "empty").mkdir()
    path = training.save(tmp_path / "empty")
    before = (path / "manifest.json").stat().st_mtime_ns
    with pytest.raises(ValueError, match="directory must be new"):
        training.save(path)
    assert (path / "manifest.json").stat().st_mtime_ns == before
    assert os.listdir(tmp_path) == ["empty"]


def test_where_a_link_points_to_the_checkpoint_goes(tmp_path: Any) -> None:
    """As to a larger disk, where a directory is already, or none yet."""
    training, _ = of_kind()
    (tmp_path / "large" / "empty").mkdir(parents=True)
    for name in ("empty", "new"):
        (tmp_path / name).symlink_to(tmp_path / "large" / name)
        path = training.save(tmp_path / name)
        assert path == tmp_path / "large" / name
        assert (tmp_path / name).is_symlink()
        training.load(tmp_path / name)
    assert sorted(os.listdir(tmp_path / "large")) == ["empty", "new"]
    assert sorted(os.listdir(tmp_path)) == ["empty", "large", "new"]


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path: Any) -> None:
    training, _ = of_kind()
    with pytest.raises(ValueError, match=r"got a object at extra\.it"):
        training.save(tmp_path / "saved", extra={"it": object()})
    training.optimizer.param_groups[1]["mine"] = object()
    with pytest.raises(ValueError, match=r"the parameter group 1\.mine"):
        training.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_processes_keep_one_extra_and_others_are_refused_before_anything_is_written(tmp_path: Any, format: Any) -> None:
    """The first one's was kept, and every process got it back."""
    models = [Residual() for _ in range(2)]

    def run(one: Replicas) -> None:
        model = offload_shared(models[one.rank], one, device="cpu", window=1)
        copies = model.parameters() if one.rank else ()
        engine_of(model).join(one.everyone, shared={}, copies=copies, model="Residual", passes=1, here=2)
        optimizer = stronghold.AdamW(model.parameters())
        rule = r"one extra.*\(got \{'position': \(10, nan\)\} in process 0 and \{'position': \(11, nan\)\} in process 1"
        with pytest.raises(ValueError, match=rule):
            extra = {"position": (10 + one.rank, math.nan)}
            stronghold.checkpoint.save(tmp_path / "refused", model, optimizer, extra=extra, format=format)
        one.everyone.barrier()
        assert not [*tmp_path.iterdir()]
        one.everyone.barrier()
        if format == "safetensors":
            same = {"position": (10, math.nan), "of": torch.ones(2)}
            stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, extra=same)

    in_threads(2, run)
    if format == "safetensors":
        model = stronghold.offload(Residual(), device="cpu")
        extra = stronghold.checkpoint.load(tmp_path / "saved", model, stronghold.AdamW(model.parameters()))
        assert extra["position"][0] == 10 and math.isnan(extra["position"][1])
        assert torch.equal(extra["of"], torch.ones(2))
        for name, parameter in models[0].named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))
