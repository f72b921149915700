"""`stronghold.plan(processes=N)`: the best of every split of the processes, against the plans of each, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.training_plan import TrainingPlan
from tests.planner.machines import about, laptop, machine

CONFIG = GPTConfig(layers=5, hidden=64, heads=4, sequence=32, vocabulary=128)
MESSAGES = {"message_s": about(1e-4), "bytes_per_s": about(1e9)}


@pytest.fixture(autouse=True)
def _process_of_known_size(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)


def gpt():
    with torch.device("meta"):
        return LayeredGPT(GPT(CONFIG))


def planned(row=None, given=None, **settings):
    given = machine(processes=MESSAGES) if given is None else given
    settings = {"batch": 8, "sequence": 32, "processes": 4, **settings}
    return stronghold.plan(gpt() if row is None else row, machine=given, **settings)


def tower(layers=6):
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(layers)))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(machine(processes=MESSAGES), marks=pytest.mark.long, id="gpu"),
        pytest.param(laptop(processes=MESSAGES), id="cpu"),
    ],
)
def test_every_split_of_the_processes_has_its_best_plan_and_the_shortest_comes_first(given, tmp_path):
    plan = planned(given=given)
    splits = [(one.parallel["stages"], one.parallel["replicas"], one.step_s) for one in plan.others]
    assert [step_s for _, _, step_s in splits] == sorted(step_s for _, _, step_s in splits)
    assert all(plan.step_s.likely <= step_s for _, _, step_s in splits)
    found = {replicas for _, replicas, _ in splits} | {plan.parallel["replicas"]}
    assert found == {1, 2, 4}
    assert plan.processes == 4 and plan.left_out == ()
    assert (plan.samples, plan.tokens, plan.layers) == (8, 256, 5)
    plan.write(tmp_path / "plan.json")
    assert str(TrainingPlan.read(tmp_path / "plan.json")) == str(plan)
    lines = {(section, name): value for section, name, value in plan.rows()}
    assert lines["processes", "number"].startswith("4 on this machine")
    assert "at most" in lines["", "memory of each"]


def test_in_one_process_there_is_nothing_of_several_in_a_plan():
    alone = stronghold.plan(gpt().model, machine=machine(), batch=8, sequence=32)
    assert alone == stronghold.plan(gpt().model, machine=machine(), batch=8, sequence=32, processes=1)
    assert alone == replace(planned(given=machine(), processes=1), model="GPT")
    found = json.loads(alone.to_json())
    of_several = {"processes", "parallel", "left_out"}
    assert not of_several & found.keys()
    assert all(not of_several & one.keys() for one in (*found["others"], *found["refused"]))
    assert "processes" not in str(alone)


def test_replicas_of_a_machine_whose_messages_take_no_time_share_out_the_batch_and_the_updates():
    """Of layers that wait for nothing but their updates, whose threads all have in common, two take as long as one."""
    settings = {"window": 2, "resident": 0, "update": "deferred", "micro_batch": None, "activations": "recompute"}
    given = replace(machine(), launch_s=about(0.0), op_s=about(0.0))
    alone = stronghold.plan(gpt().model, machine=given, batch=4, sequence=32, **settings)
    both = stronghold.plan(gpt().model, machine=given, batch=8, sequence=32, processes=2, **settings)
    assert both.parallel == {"stages": 1, "replicas": 2}
    for name in ("compute", "fetches", "updates"):
        assert both.busy_s[name] == pytest.approx(alone.busy_s[name])
    # Of gradients each copies its half, and what a copy takes beside its bytes.
    copies_s = given.link["copy_s"].likely * 5
    assert both.busy_s["gradients"] - copies_s == pytest.approx((alone.busy_s["gradients"] - copies_s) / 2, rel=0.01)
    assert both.slots_bytes == alone.slots_bytes
    assert both.pinned_bytes + both.pageable_bytes < 0.75 * (alone.pinned_bytes + alone.pageable_bytes)
    slow = {"message_s": about(1e-4), "bytes_per_s": about(1e8)}
    slower = stronghold.plan(
        gpt().model, machine=replace(given, processes=slow), batch=8, sequence=32, processes=2, **settings
    )
    assert slower.step_s.likely > 1.5 * both.step_s.likely


def test_an_nn_sequential_is_cut_into_stages_and_another_module_is_replicated():
    given = machine(processes=MESSAGES)
    inputs = torch.empty(3, 64)
    plan = stronghold.plan(tower(), machine=given, inputs=inputs, processes=2)
    assert plan.parallel["stages"] in (2, 4) and sum(plan.parallel["balance"]) == 6
    assert [(one.stages, one.replicas) for one in plan.left_out] == [(1, 2)]
    assert "divide the batch of 3 samples" in plan.left_out[0].reason
    plan = stronghold.plan(gpt().model, machine=given, batch=8, sequence=32, processes=2)
    assert plan.parallel == {"stages": 1, "replicas": 2}
    assert plan.left_out[0].reason.startswith("stages are cut out of an nn.Sequential, or the reference GPT (got GPT)")


def test_a_plan_of_stages_has_a_lane_for_each_process(tmp_path):
    plan = planned(processes=2, batch=3)  # which two replicas cannot share out
    assert {span.lane for span in plan.spans} == {"process 0", "process 1"}
    assert max(span.end_s for span in plan.spans) == pytest.approx(plan.step_s.likely)
    plan.write(tmp_path / "plan.json")
    assert TrainingPlan.read(tmp_path / "plan.json").spans == plan.spans


def test_stages_keep_the_activations_of_as_many_layers_as_fit(tmp_path):
    """What the device would take if all or none kept them is known; of what is between some find their room."""
    settings = {"processes": 2, "batch": 3, "micro_batch": "auto", "window": 2, "sequence": 32}
    least, most = (planned(activations=way, **settings) for way in ("recompute", "keep"))
    assert least.device_bytes < most.device_bytes and most.step_s.likely < least.step_s.likely
    found = []
    for share in (0.4, 0.6):
        budget = int(least.device_bytes + share * (most.device_bytes - least.device_bytes))
        plan = planned(device_memory=budget, **settings)
        assert plan.device_bytes <= budget
        assert plan.step_s.likely <= planned(device_memory=budget, activations="recompute", **settings).step_s.likely
        if isinstance(plan.parallel["balance"], dict):
            found.append(plan)
    assert found
    for plan in found:
        cut, ratios = plan.parallel["balance"].values()
        assert sum(cut) == 5 and any(0 <= ratio < 1 for ratio in ratios) and any(ratios)
        assert plan.settings["activations"] == "recompute"
        assert plan.step_s.low <= plan.step_s.likely <= plan.step_s.high
        assert "keep their activations" in str(plan)
        plan.write(tmp_path / "plan.json")
        assert TrainingPlan.read(tmp_path / "plan.json").parallel == plan.parallel


def test_a_number_of_layers_that_keep_their_activations_is_of_replicas_alone():
    plan = planned(processes=2, activations=2)
    assert (plan.parallel["stages"], plan.settings["activations"]) == (1, 2)
    (left,) = plan.left_out
    assert (left.stages, left.replicas) == (2, 1) and "is chosen for each (got activations=2)" in left.reason


def test_a_budget_is_each_process_s_and_what_lacks_is_told_of_each():
    plan = planned(processes=2, device_memory="2MiB")
    assert plan.device_bytes <= 2**21
    assert all(one.needed_bytes > one.limit_bytes for one in plan.refused)
    with pytest.raises(BudgetError, match=r"nothing fits 2 processes: 2 stages: device memory of each process must"):
        planned(processes=2, device_memory="1KiB")


def test_what_is_resident_in_stages_fits_the_device_memory_that_is_told():
    plan = planned(processes=2, batch=3, device_memory="64MiB")
    if plan.settings["resident"] == "auto":
        assert plan.held_device_bytes <= plan.settings["device_memory"]
    else:
        assert plan.held_device_bytes == plan.settings["device_memory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processes": 0}, r"processes must be a whole number of 1 or more \(got 0\)"),
        ({"processes": 7}, r"got processes=7; stages=7, replicas=1: each stage needs a layer, of which there are 5"),
        ({"processes": 7}, "replicas=7: the replicas must divide the batch of 8 samples"),
        ({"processes": 3, "update": "in_backward"}, "stages are planned for with deferred updates"),
        ({"processes": 3, "resident": 2}, "all layers stay on the device in a plan, or none"),
        ({"processes": 3, "micro_batch": 2}, "micro-batches of a model in stages go through all of them"),
        ({"activations": "host"}, "inputs are planned beside the device for one process"),
        ({"activations": "all"}, "activations must be"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        planned(**change)


def test_offload_does_not_follow_a_plan_of_several_processes(monkeypatch):
    plan = planned(given=laptop(processes=MESSAGES), processes=2)
    monkeypatch.setattr("stronghold.engine.planning.auto.check_plan", lambda *_: None)
    with pytest.raises(ValueError, match=r"offload follows a plan of one process \(got one of 2\)"):
        stronghold.offload(GPT(CONFIG), device="cpu", plan=plan)
