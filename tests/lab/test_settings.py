"""The settings of a training run: what is refused, and how they are recorded."""

import dataclasses
from pathlib import Path

import pytest

import stronghold
from stronghold.lab.settings import DataSettings, ModelSettings, OptimizerSettings, ParallelSettings, TrainSettings
from stronghold.settings import OffloadSettings
from tests.small import Residual


@pytest.mark.parametrize(
    ("settings", "wrong", "message"),
    [
        (TrainSettings, {"batch": 0}, "batch must be a whole number of at least 1 \\(got 0\\)"),
        (TrainSettings, {"steps": 2.5}, "steps must be a whole number of at least 1 \\(got 2.5\\)"),
        (TrainSettings, {"steps": True}, "steps must be a whole number of at least 1 \\(got True\\)"),
        (TrainSettings, {"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1 \\(got 0\\)"),
        (TrainSettings, {"keep_checkpoints": 0}, "keep_checkpoints must be a whole number of at least 1"),
        (TrainSettings, {"sequence": 1}, "sequence must be a whole number of at least 2 \\(got 1\\)"),
        (TrainSettings, {"seed": -1}, "seed must be a whole number of at least 0 \\(got -1\\)"),
        (TrainSettings, {"dtype": "fp16"}, "dtype must be 'fp32' or 'bf16' \\(got 'fp16'\\)"),
        (TrainSettings, {"device": "mars"}, "device must be cpu, cuda, cuda:N or .* \\(got 'mars'; torch sees "),
        (DataSettings, {"held_out": -1}, "held_out must be a whole number of at least 0 \\(got -1\\)"),
        (OptimizerSettings, {"lr": 0.0}, "lr must be a positive number \\(got 0.0\\)"),
        (OptimizerSettings, {"lr": float("nan")}, "lr must be a positive number \\(got nan\\)"),
        (OptimizerSettings, {"lr": float("inf")}, "lr must be a positive number \\(got inf\\)"),
        (OptimizerSettings, {"weight_decay": -0.1}, "weight_decay must be 0 or a positive number"),
        (OptimizerSettings, {"max_grad_norm": 0.0}, "max_grad_norm must be a positive number, or None"),
        (OptimizerSettings, {"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0"),
        (OptimizerSettings, {"decay_steps": 0}, "decay_steps must be a whole number of at least 1 \\(got 0\\)"),
        (OptimizerSettings, {"update": "later"}, "update must be 'deferred' or 'in_backward'"),
        (OptimizerSettings, {"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip'"),
        (
            OptimizerSettings,
            {"update": "in_backward", "max_grad_norm": 1.0},
            "got max_grad_norm=1.0 with update='in_backward'.*use update='deferred'",
        ),
    ],
)
def test_values_out_of_range_are_refused(settings, wrong, message):
    with pytest.raises(ValueError, match=message):
        settings(**({"out": "x"} if settings is TrainSettings else {}), **wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_devices(device):
    assert TrainSettings(out="x", device=device).device == device


def test_every_setting_is_recorded_by_its_own_name():
    settings = TrainSettings(
        out="here",
        model=ModelSettings(layers=3),
        data=DataSettings(source="text"),
        optimizer=OptimizerSettings(lr=0.5, states="8bit"),
        offload=OffloadSettings(window=2),
        sequence=64,
    )
    flat = settings.flat()
    expected = {"method": "stronghold", "layers": 3, "source": "text", "lr": 0.5, "states": "8bit", "window": 2}
    assert flat | expected == flat and flat["sequence"] == 64
    groups = (settings.model, settings.data, settings.optimizer, settings.offload, settings.parallel)
    names = [name for group in groups for name in vars(group)]
    assert sorted(names) == sorted([*set(names), "update", "states"])  # which the store is told of the optimizer
    assert set(flat) == {*names, *vars(settings)} - {"model", "data", "optimizer", "offload", "parallel"}


def test_the_command_lines_word_for_a_directory_of_the_run_names_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for store in ("disk", ["disk"], [tmp_path, "disk"], ["ram"], ["ram", tmp_path]):
        with pytest.raises(ValueError, match=r"store must be 'ram' alone, or directories .* or './(disk|ram)'"):
            OffloadSettings(store=store)
    for store, directories in (
        ("./disk", ["./disk"]),
        (Path("disk"), ["./disk"]),
        ("./ram", ["./ram"]),
        (Path("ram"), ["./ram"]),
        ([Path("ram")], ["./ram"]),
        ([Path("ram"), "b"], ["./ram", "b"]),
        ("ram", []),
        ("run-12:30:05", ["run-12:30:05"]),
        (Path("run-12:30:05"), ["run-12:30:05"]),
        (["run-12:30:05", Path("b")], ["run-12:30:05", "b"]),
    ):
        settings = OffloadSettings(store=store)
        for same in (settings, OffloadSettings(**vars(settings)), OffloadSettings(**dataclasses.asdict(settings))):
            assert same.directories == directories
    with pytest.raises(ValueError, match="store must be 'ram' alone"):
        stronghold.offload(Residual(), store="disk", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_is_left_open_is_of_the_steps_a_run_begins_with():
    def schedule(before=None, steps=300, **given):
        settings = TrainSettings(out="x", steps=steps, optimizer=OptimizerSettings(**given)).begun(before)
        return settings.optimizer.warmup_steps, settings.optimizer.decay_steps

    assert schedule() == (0, 300)
    assert schedule(warmup_steps=None) == (30, 300)
    assert schedule(warmup_steps=None, steps=5000) == (100, 5000)
    assert schedule(warmup_steps=7, decay_steps=9) == (7, 9)
    began = {"steps": 50, "warmup_steps": 4, "decay_steps": 40}
    assert schedule(began, warmup_steps=None) == (4, 40)
    assert schedule(began, warmup_steps=5) == (5, 40)
    assert schedule({"steps": 50, "warmup_steps": 4}, warmup_steps=None) == (4, 50)


def test_micro_batches_that_are_left_open_are_those_that_a_run_begins_with():
    def begun(before=None, **given):
        return TrainSettings(out="x", batch=12, parallel=ParallelSettings(**given)).begun(before)

    def count(before=None, **given):
        return begun(before and begun(**before).flat(), **given).parallel.micro_batches

    assert count() is None
    assert count(replicas=2) is None
    assert count(stages=2) == 6
    assert count(stages=3) == 12
    assert count(stages=2, replicas=4) == 3
    assert count(stages=3, micro_batches=2) == 2
    assert count({"stages": 2}, stages=3) == 6, "in other stages, too"
    assert count({"stages": 2, "micro_batches": 4}, stages=2) == 4
    assert count({"stages": 2, "micro_batches": 4}, stages=2, micro_batches=3) == 3, "which is compared"
    assert count({"stages": 2, "micro_batches": 12}, stages=2, replicas=4) == 3, "which 12 do not divide"
    assert count({"stages": 2}) is None
    assert count({"replicas": 1}, stages=2) == 6
    earlier = begun(stages=2).flat() | {"micro_batches": None}  # of a version that did not settle it
    assert begun(earlier, stages=3).parallel.micro_batches == 6


@pytest.mark.parametrize("name", ["log", "record"])
def test_the_partition_that_is_read_is_not_written_over(tmp_path, name):
    file = tmp_path / "part.json"
    file.write_text('{"partition": [1, 1], "recompute_ratio": [1, 1]}')
    settings = TrainSettings(
        out=str(tmp_path / "run"), parallel=ParallelSettings(stages=2, balance=str(file)), **{name: str(file)}
    )
    with pytest.raises(ValueError, match=rf"{name} must have .* balance='{file}', which is read, and would be lost"):
        settings.check_outputs()
