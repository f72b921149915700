"""The performance model: by hand on a few operators, and its step against a pipeline that is played."""

import random
from itertools import pairwise

import pytest

from stronghold.planner.profiled.files import read_profile
from stronghold.planner.profiled.layouts import Reshard, Share, TensorLayout, reshard
from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage
from stronghold.planner.profiled.predict import pipeline_s, predict
from tests.planner.profiled.small_profiles import HEAD, write_profile
from tests.planner.profiled.test_files import GPT, MIB


def played(forward_s, backward_s, micro_batches):
    """Returns when the last pass ends in 1F1B: each pass begins when its stage is free and what it needs is there."""
    stages, done = len(forward_s), {}
    orders = []
    for stage in range(stages):
        warm = min(stages - stage - 1, micro_batches)
        order = [("F", n) for n in range(warm)]
        for n in range(micro_batches - warm):
            order += [("F", n + warm), ("B", n)]
        orders.append(order + [("B", n) for n in range(micro_batches - warm, micro_batches)])
    free, places = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                kind, n = orders[stage][places[stage]]
                if kind == "F":
                    needs = None if stage == 0 else ("F", stage - 1, n)
                else:
                    needs = ("F", stage, n) if stage == stages - 1 else ("B", stage + 1, n)
                if needs is not None and needs not in done:
                    break
                began = max(free[stage], 0.0 if needs is None else done[needs])
                free[stage] = done[kind, stage, n] = began + (forward_s if kind == "F" else backward_s)[stage]
                places[stage] += 1
    return max(free)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 20])
def test_even_stages_take_what_a_played_pipeline_takes(stages, micro_batches):
    step_s = pipeline_s([3.0] * stages, micro_batches)
    assert step_s == pytest.approx(played([1.0] * stages, [2.0] * stages, micro_batches))


def test_uneven_stages_take_about_what_a_played_pipeline_takes():
    """The formula fills the pipeline with every stage's time; a played one overlaps or waits for a little of that."""
    rng = random.Random(4)
    ratios = []
    for _ in range(200):
        stages = rng.randint(1, 6)
        forward_s = [rng.uniform(0.9, 1.1) for _ in range(stages)]
        backward_s = [2 * one for one in forward_s]
        micro_batches = rng.randint(4 * stages, 40)
        stages_s = [sum(pair) for pair in zip(forward_s, backward_s, strict=True)]
        ratios.append(played(forward_s, backward_s, micro_batches) / pipeline_s(stages_s, micro_batches))
    assert min(ratios) > 0.97
    assert max(ratios) < 1.03


def toy(folder, lines, model="toy_a"):
    write_profile(folder, model, [line.split(",")[0] for line in lines])
    for degree in (1, 2):
        (folder / f"{model}_mbs1_tp{degree}_algo0.csv").write_text("\n".join([HEAD, *lines]) + "\n")
    return read_profile(folder, model)


def plan_of(*sizes, recomputed, batch=4, model="toy_a"):
    stages, begin = [], 0
    for size in sizes:
        again = tuple(number in recomputed for number in range(begin, begin + size))
        stages.append(OperatorStage(begin=begin, devices=1, choices=(Share(1, 1),) * size, recomputed=again))
        begin += size
    return OperatorPlan(model=model, layers=1, batch=batch, micro_batch=1, stages=tuple(stages))


def test_seconds_and_bytes_by_hand(tmp_path):
    lines = ["a,10,20,4,8,1,100,3,5", "b,30,40,8,16,2,200,7,1", "c,50,60,16,4,3,300,0,9", "d,70,80,4,4,4,400,9,9"]
    profile = toy(tmp_path, lines)
    plan = plan_of(3, 1, recomputed={0, 1})
    first, last = predict(profile, plan, 2).stages
    assert first.forward_s == pytest.approx(90e-6)
    assert first.backward_s == pytest.approx(120e-6)
    assert first.recompute_s == pytest.approx(40e-6)
    assert first.receive_s == pytest.approx(4 / 21e3)
    assert first.send_s == pytest.approx(4 / 21e3)
    assert last.send_s == pytest.approx(4 / 4.25e3)  # the last device of the node
    assert first.state_bytes == 4 * 6 * MIB
    # Input and activations but those of a, of two micro-batches; those of a come back for one.
    assert first.activation_bytes == ((4 + 500) * 2 + 100) * MIB
    assert first.reserved_bytes == (7 + 5) * MIB  # the last operator's is not in it
    assert last.activation_bytes == 404 * MIB
    assert last.reserved_bytes == 4 * MIB
    stages_s = [one.micro_batch_s for one in (first, last)]
    assert predict(profile, plan, 2).step_s == pytest.approx(sum(stages_s) + 3 * max(stages_s))


def test_a_block_keeps_its_input_and_ends_a_run(tmp_path):
    write_profile(tmp_path, "gpt_toy", GPT, samples=(1,), degrees=(1,))
    rows = [f"{name},1,1,0,0,0,{2**number},0,0" for number, name in enumerate(GPT)]
    (tmp_path / "gpt_toy_mbs1_tp1_algo0.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    profile = read_profile(tmp_path, "gpt_toy", 2)
    everything = plan_of(29, recomputed=range(29), model="gpt_toy")
    nothing = plan_of(29, recomputed=(), model="gpt_toy")
    held = [2**n for n in range(16)]
    held[4], held[5] = 0, 1.5 * held[5]  # softmax works in place, and dropout has a mask beside its output
    layer = sum(held[1:14])
    kept = predict(profile, nothing, 1).stages[0].activation_bytes / MIB
    assert kept == held[0] + 2 * layer + held[14] + held[15]
    recomputed = predict(profile, everything, 1).stages[0].activation_bytes / MIB
    # Kept: the first operator and each layer's last, whose outputs blocks begin with, and the plan's last.
    # The second layer and the head come back together: the largest run.
    assert recomputed == held[0] + held[13] + held[15] + (layer + held[14])


@pytest.mark.parametrize(
    ("given", "wanted", "change"),
    [
        (TensorLayout(2, (1, 1, 1)), TensorLayout(2, (1, 1, 1)), None),
        (TensorLayout(4, (1, 1, 1)), TensorLayout(1, (1, 1, 4)), Reshard("split", "all_gather", 4)),
        (TensorLayout(1, (1, 1, 4)), TensorLayout(4, (1, 1, 1)), Reshard("all_gather", "split", 4)),
        (TensorLayout(1, (4, 2, 1)), TensorLayout(1, (1, 2, 4)), Reshard("all_to_all", "all_to_all", 4)),
        (None, TensorLayout(4, (1, 1, 1)), None),
    ],
)
def test_layouts_change_by_collectives(given, wanted, change):
    assert reshard(given, wanted) == change


def test_collectives_are_between_operators_that_differ(tmp_path):
    names = ["conv1", "bn1", "relu1"]
    profile = read_profile(write_profile(tmp_path, "resnet_toy", names), "resnet_toy")
    split, copied = Share(2, 1), Share(1, 2)
    stage = OperatorStage(begin=0, devices=2, choices=(split, split, copied), recomputed=(False,) * 3)
    plan = OperatorPlan(model="resnet_toy", layers=1, batch=2, micro_batch=2, stages=(stage,))
    size = profile.costs_of(2, copied)[2].input_bytes / MIB
    expected = 1e-3 * (0.1 + 0.02 * round(size))  # the gradient's all_gather; forward is a split
    assert predict(profile, plan, 2).stages[0].reshard_s == pytest.approx(expected)
    profile.links.collectives["all_gather"].clear()
    with pytest.raises(ValueError, match="all_gather among 2 devices for the input of relu1"):
        predict(profile, plan, 2)


def test_a_plan_of_other_operators_is_refused(tmp_path):
    profile = read_profile(write_profile(tmp_path, "toy_a", ["one", "two"]), "toy_a")
    with pytest.raises(ValueError, match=r"operators of the profile \(got 3, toy_a has 2\)"):
        predict(profile, plan_of(2, 1, recomputed=()), 2)


def test_stages_follow_one_another():
    plan = plan_of(3, 2, 4, recomputed=())
    assert all(one.end == after.begin for one, after in pairwise(plan.stages))
