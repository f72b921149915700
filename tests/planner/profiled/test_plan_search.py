"""The search against all plans of small spaces, on random profiles."""

import math
from itertools import combinations, product

import pytest

from stronghold.errors import BudgetError
from stronghold.planner.profiled.files import read_profile
from stronghold.planner.profiled.layouts import Share
from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage
from stronghold.planner.profiled.plan_search import search
from stronghold.planner.profiled.predict import predict
from stronghold.planner.profiled.reach import Cluster
from tests.planner.profiled.small_profiles import write_profile

MIB = 2**20


def splits(devices):
    """Yields the devices of stages, powers of two that add up."""
    if not devices:
        yield ()
    for size in (1, 2):
        if size <= devices:
            yield from ((size, *rest) for rest in splits(devices - size))


def all_plans(profile, devices, batch):
    """Yields every plan whose stages share one choice, or, of Wide-ResNet, have any for each operator."""
    count = len(profile.operators)
    for sizes in splits(devices):
        for borders in combinations(range(1, count), len(sizes) - 1):
            ends = [0, *borders, count]
            for micro_batch in (1, 2, 4):
                ways = []
                for number, size in enumerate(sizes):
                    length = ends[number + 1] - ends[number]
                    fitting = [
                        Share(degree, size // degree)
                        for degree in (1, 2)
                        if size % degree == 0 and (micro_batch / (size // degree), degree, 0) in profile.costs
                    ]
                    if profile.family.layouts is None:
                        shared = [(choice,) * length for choice in fitting]
                    else:
                        shared = list(product(fitting, repeat=length))
                    ways.append(list(product(shared, product((False, True), repeat=length))))
                for chosen in product(*ways):
                    stages = tuple(
                        OperatorStage(begin=ends[n], devices=sizes[n], choices=choices, recomputed=again)
                        for n, (choices, again) in enumerate(chosen)
                    )
                    yield OperatorPlan(
                        model=profile.model, layers=1, batch=batch, micro_batch=micro_batch, stages=stages
                    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["toy_a", "resnet_toy"])
def test_the_search_finds_about_the_best_of_all_plans(tmp_path, model, seed):
    names = ["one", "two", "three", "four", "five"] if model == "toy_a" else ["conv1", "bn2", "conv2", "fc"]
    profile = read_profile(write_profile(tmp_path, model, names, seed=seed), model)
    for devices in (1, 2):
        plans = [(predict(profile, plan, devices), plan) for plan in all_plans(profile, devices, 8)]
        sizes = sorted(prediction.device_bytes for prediction, _ in plans)
        for size in (sizes[0] * 1.15, sizes[len(sizes) // 2], sizes[-1]):  # tight, middling, ample
            memory_bytes = math.ceil(size)
            best = min(one.step_s for one, _ in plans if one.device_bytes <= memory_bytes)
            cluster = Cluster(nodes=1, devices_per_node=devices)
            found = search(profile, cluster, batch=8, memory_bytes=memory_bytes)
            prediction = predict(profile, found.plan, devices)
            assert prediction.step_s == found.prediction.step_s
            assert prediction.device_bytes <= memory_bytes
            assert found.plan.devices == devices
            # Choices of operators' own are found by a price of memory: with four operators, and memory to the byte, the
            # best lie between two prices.
            far = 1.25 if profile.family.layouts is not None and size < sizes[-1] else 1.03
            assert found.prediction.step_s <= best * far


def test_what_would_fit_is_told(tmp_path):
    profile = read_profile(write_profile(tmp_path, "toy_a", ["one", "two", "three", "four"]), "toy_a")
    plans = [predict(profile, plan, 2).device_bytes for plan in all_plans(profile, 2, 8)]
    cluster = Cluster(nodes=1, devices_per_node=2)
    with pytest.raises(BudgetError, match=r"about .* would do") as caught:
        search(profile, cluster, batch=8, memory_bytes=MIB)
    least = caught.value.needed["device"]
    assert min(plans) <= least <= 1.1 * min(plans)
    assert search(profile, cluster, batch=8, memory_bytes=int(1.05 * least)).prediction.device_bytes <= 1.05 * least


def test_stages_stay_in_their_nodes(tmp_path):
    names = [f"op{n}" for n in range(12)]
    profile = read_profile(write_profile(tmp_path, "toy_a", names), "toy_a")
    found = search(profile, Cluster(nodes=3, devices_per_node=2), batch=8, memory_bytes=10**12)
    borders = [sum(stage.devices for stage in found.plan.stages[:n]) for n in range(len(found.plan.stages) + 1)]
    assert {0, 2, 4, 6} <= set(borders)


def test_a_batch_that_no_micro_batch_divides_is_refused(tmp_path):
    profile = read_profile(write_profile(tmp_path, "toy_a", ["one"], samples=(2, 4)), "toy_a")
    with pytest.raises(ValueError, match=r"were profiled.* \(got 7 on nodes of 1; toy_a has .* of 2, 4 samples"):
        search(profile, Cluster(nodes=1, devices_per_node=1), batch=7, memory_bytes=10**12)
    odd = read_profile(write_profile(tmp_path, "toy_b", ["one"], degrees=(3,), algorithms=(1,)), "toy_b")
    with pytest.raises(ValueError, match=r"a power of two .* degrees of 3, algorithms 1\)"):
        search(odd, Cluster(nodes=1, devices_per_node=1), batch=8, memory_bytes=10**12)
    for changed in ({"batch": 0}, {"most_stages": 0}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            search(profile, Cluster(nodes=1, devices_per_node=1), **{"batch": 8, "memory_bytes": 1, **changed})
