"""A plan over operators: its file there and back, Aceso's file, and what is no plan."""

import json

import pytest

from stronghold.planner.profiled.layouts import Share
from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage, read_operator_plan

PLAN = OperatorPlan(
    model="gpt_1_3B",
    layers=24,
    batch=8,
    micro_batch=2,
    stages=(
        OperatorStage(begin=0, devices=2, choices=(Share(2, 1), Share(1, 2, 1)), recomputed=(True, False)),
        OperatorStage(begin=2, devices=1, choices=(Share(1, 1),), recomputed=(False,)),
    ),
)


def test_a_plan_is_what_its_file_gives_back(tmp_path):
    PLAN.write(tmp_path / "plan.json", predicted_step_s=1.5)
    assert read_operator_plan(tmp_path / "plan.json") == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["predicted_step_s"] == 1.5


def test_the_keys_are_those_of_acesos_files():
    found = PLAN.to_dict()
    assert found == {
        "model_name": "gpt",
        "model_size": "1_3B",
        "num_layers": 24,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_stages": 2,
        "num_gpus": [2, 1],
        "checkpoint_activations": [True, False],
        "resharding_stages": [True, False],
        "num_ops_in_each_stage": [2, 1],
        "model_parallel_size_of_each_op": [[2, 1], [1]],
        "data_parallel_size_of_each_op": [[1, 2], [1]],
        "recompute_ops": [[1, 0], [0]],
        "algo_of_each_op": [[0, 1], [0]],
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_gpus": [2]}, r"num_gpus must have an entry for each stage \(got 1 for 2\)"),
        ({"num_gpus": [4, 1]}, r"stage 0 must use the stage's 4 devices \(got 2 times 1\)"),
        ({"recompute_ops": [[1], [0]]}, r"recompute_ops of stage 0 must have 2 entries \(got 1\)"),
        ({"micro_batch_size": 3}, r"whole number of micro-batches \(got 8 and 3\)"),
        ({"global_batch_size": "8"}, r"global_batch_size must be a whole number \(got '8'\)"),
        ({"algo_of_each_op": [[0, 1.5], [0]]}, r"algo_of_each_op must be a whole number \(got 1.5\)"),
        ({"num_ops_in_each_stage": [2.0, 1.0]}, r"num_ops_in_each_stage must be a whole number \(got 2.0\)"),
        ({"num_stages": 3}, r"num_stages must be the number of stages \(got 3 for 2\)"),
        ({"num_ops_in_each_stage": [], "num_gpus": [], "num_stages": 0}, "must have an entry for each stage"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, changed, told):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN.to_dict(), **changed}))
    with pytest.raises(ValueError, match=f"plan.json.*{told}"):
        read_operator_plan(path)


def test_a_file_without_a_key_or_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"model_name": "gpt"}')
    with pytest.raises(ValueError, match="it has no 'model_size'"):
        read_operator_plan(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="got a list"):
        read_operator_plan(path)
    with pytest.raises(ValueError, match="No such file"):
        read_operator_plan(tmp_path / "other.json")
