"""`stronghold plan --processes` and runs that follow it by torchrun's environment, on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from stronghold.lab import cli
from stronghold.planner.training_plan import TrainingPlan
from stronghold.probing.this_machine import processor_name
from tests.distributed.launched import start
from tests.planner.machines import about, laptop

SHAPE = ["-l", "3", "--hidden", "32", "--heads", "2", "--vocabulary", "300"]


@pytest.mark.parametrize(
    ("batch", "more", "parts"),
    [
        # which two replicas cannot share out
        pytest.param("3", [], {"stages": 2, "replicas": 1}, marks=pytest.mark.long),
        ("3", [], {"stages": 2, "balance": {"partition": [2, 1], "recompute_ratio": [0.5, 0]}}),
        ("4", ["--micro-batch", "1"], {"stages": 1, "replicas": 2}),  # which no stage does
    ],
)
def test_a_run_of_two_processes_follows_its_plan_and_shows_it_beside_what_it_measures(
    tmp_path, monkeypatch, capsys, batch, more, parts
):
    monkeypatch.chdir(tmp_path)
    messages = {"message_s": about(1e-4), "bytes_per_s": about(1e9)}
    laptop(device_name=processor_name(), processes=messages).write("machine.json")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    asked = ["--processes", "2", "--batch", batch, "--seq", "32", "--machine", "machine.json", "-o", "plan.json"]
    assert cli.main(["plan", *SHAPE, *asked, *more]) == 0
    assert "OMP_NUM_THREADS=8 torchrun --nproc-per-node 2 -m stronghold train --plan" in " ".join(
        capsys.readouterr().out.split()
    )
    plan = TrainingPlan.read("plan.json")
    if "balance" in parts:  # as it is where memory asks for it
        settings = {**plan.settings, "activations": "recompute"}
        plan = replace(plan, parallel={**plan.parallel, **parts}, settings=settings)
        plan.write("plan.json")
    assert {name: plan.parallel[name] for name in parts} == parts
    # By whole paths: those processes are forked from one that began in another test's folder.
    run = ["train", "--plan", str(tmp_path / "plan.json"), *SHAPE, "--data", str(tmp_path / "text.txt"), "--steps", "3"]
    codes, said = start(["-m", "stronghold", *run, "--out", str(tmp_path / "out")], 2, tmp_path, launcher=True)
    assert codes == [0, 0], "\n".join(said)
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    settings = lines[0].get("settings", lines[0])
    for name, value in {**plan.parallel, **plan.settings, **plan.optimizer}.items():
        assert settings[name] == value, name
    assert (settings["batch"], settings["sequence"]) == (int(batch), 32)
    assert re.search(r"step +│ planned +│ ", said[0])
    assert re.search(r"measured +│ .*[+-]\d+%", said[0])
    (step, *_) = [line for line in lines if line.get("step") == 3]
    held = plan.held_device_bytes + plan.pinned_bytes + plan.pageable_bytes
    found = step["device_bytes"] + step["host_bytes"]
    if (
        parts.get("replicas") == 2
    ):  # of the same size, and as planned but for where a gradient's shares are of equal length
        assert found / 2 == pytest.approx(held, rel=0.02)
    else:  # the plan is of the fuller one
        assert found / 2 <= held < found


def test_a_plan_is_followed_by_as_many_processes_as_it_is_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    laptop(device_name=processor_name()).write("machine.json")
    asked = ["--batch", "2", "--seq", "32", "--machine", "machine.json", "-o", "plan.json"]
    run = ["train", "--plan", "plan.json", *SHAPE, "--steps", "2", "--out", "out"]
    assert cli.main(["plan", *SHAPE, *asked, "--processes", "2", "--cores", "4"]) == 0
    assert "OMP_NUM_THREADS=2 torchrun" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["plan", *SHAPE, *asked, "--processes", "2"]) == 0
    capsys.readouterr()
    assert cli.main(run) == 2
    assert "(got 1 for one of 2); start it with torchrun --nproc-per-node 2 -m stronghold" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*run, "--stages", "3"]) == 2
    assert "leave out --stages, or plan with it: stronghold plan --processes N" in capsys.readouterr().err
    assert cli.main(["plan", *SHAPE, *asked]) == 0
    capsys.readouterr()
    assert cli.main(run) == 2
    assert "(got 2 for one of 1); start it with stronghold train --plan, without torchrun" in capsys.readouterr().err
