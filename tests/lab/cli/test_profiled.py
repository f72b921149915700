"""`stronghold plan --profile`: a plan from files, its table and its file, and what is refused."""

import json

import pytest

from stronghold.lab.cli import main
from tests.planner.profiled.small_profiles import write_profile

ARGUMENTS = ["--devices-per-node", "2", "--device-memory", "1GiB", "--batch", "8"]


@pytest.fixture
def folder(tmp_path):
    return write_profile(tmp_path, "toy_a", ["one", "two", "three", "four"])


def test_a_plan_is_shown_written_and_replayed(folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, "-o", str(plan)]) == 0
    shown = capsys.readouterr().out
    assert "4 operators, as profiled" in shown
    assert "stage 0" in shown
    found = json.loads(plan.read_text())
    assert sum(found["num_gpus"]) == 2
    assert f"{found['predicted_step_s']:.4g} s, by the profile" in shown
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, "--replay", str(plan)]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in shown.splitlines() if "plan.json" not in line]
    other = ["--batch", "16", "--replay", str(plan)]
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, *other]) == 2
    assert "got --batch 16, a plan for 8" in capsys.readouterr().err


def test_a_stage_over_two_nodes_is_refused(folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, "-o", str(plan)]) == 0
    found = json.loads(plan.read_text())
    one = {"num_stages": 1, "num_gpus": [2], "num_ops_in_each_stage": [4], "recompute_ops": [[0] * 4]}
    one |= {"algo_of_each_op": [[0] * 4], "data_parallel_size_of_each_op": [[2] * 4]}
    plan.write_text(json.dumps({**found, **one, "model_parallel_size_of_each_op": [[1] * 4]}))
    capsys.readouterr()
    nodes = ["--nodes", "2", "--devices-per-node", "1", "--device-memory", "1GiB"]
    assert main(["plan", "toy_a", "--profile", str(folder), *nodes, "--replay", str(plan)]) == 2
    assert "stage must be within a node (got stage 0 of the plan on 2 devices" in capsys.readouterr().err


def test_a_plan_with_degrees_says_that_they_are_not_executed(folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, "-o", str(plan)])
    found = json.loads(plan.read_text())
    found |= {"num_gpus": [2], "num_ops_in_each_stage": [4], "recompute_ops": [[0] * 4], "algo_of_each_op": [[0] * 4]}
    found |= {"model_parallel_size_of_each_op": [[2] * 4], "data_parallel_size_of_each_op": [[1] * 4]}
    plan.write_text(json.dumps({**found, "micro_batch_size": 1}))
    capsys.readouterr()
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, "--replay", str(plan)]) == 0
    assert "not executed by stronghold" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--window", "2"], "over operators alone (got --window)"),
        (["--hidden", "64"], "over operators alone (got --hidden)"),
        (["--processes", "2"], "over operators alone (got --processes)"),
        (["--dtype", "fp32"], "over operators alone (got --dtype)"),
        (["--states", "any"], "over operators alone (got --states)"),
        (["--optimizer", "adamw"], "over operators alone (got --optimizer)"),
        (["--tokens", "1e9"], "over operators alone (got --tokens)"),
        (["--seq", "128"], "over operators alone (got --seq)"),
        (["--cores", "8"], "over operators alone (got --cores)"),
        (["--experts-per-part", "2"], "over operators alone (got --experts-per-part)"),
        (["-l", "4"], "must not be given"),
        (["--device-memory", "1MiB"], "would do"),
    ],
)
def test_what_says_nothing_here_is_refused(folder, capsys, more, told):
    assert main(["plan", "toy_a", "--profile", str(folder), *ARGUMENTS, *more]) == 2
    assert told in capsys.readouterr().err


def test_a_model_and_the_memory_are_asked_for(folder, capsys):
    assert main(["plan", "--profile", str(folder), "--device-memory", "1GiB"]) == 2
    assert "got no MODEL); " in capsys.readouterr().err
    assert main(["plan", "toy_a", "--profile", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "got no --device-memory" in error
    assert "toy_a" in error
