"""The search over stages and replicas against every choice, on random rows of layers and random machines."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from stronghold.errors import BudgetError
from stronghold.planner import staged_search
from stronghold.planner.cuts import furthest
from stronghold.planner.machine_share import reduced, share_of
from stronghold.planner.offloaded_stages import OffloadedLayer, OffloadedStages
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.stage_costs import LayerCost, StageCosts
from stronghold.planner.stage_disk import OnDisk, StageDisk
from stronghold.planner.staged_search import StagedSpace, search_stages
from stronghold.planner.staged_step import StagedWork, fits, needed_bytes, spans_of, staged_bound_s, staged_step
from stronghold.planner.step_costs import Machine
from tests.crossed import seeds


class Row:
    """A row of random layers on a random machine of ``processes`` processes, and its steps under a choice."""

    def __init__(self, seed, layers, processes, batch):
        rng = self.rng = random.Random(seed)
        factor = lambda: 10 ** rng.uniform(-0.5, 0.5)  # noqa: E731
        alike = rng.random() < 0.4
        self.elements = [10_000 if alike else rng.randint(4_000, 20_000) for _ in range(layers)]
        self.head_s, self.batch, self.layers, self.processes = rng.choice((0.0, 0.02)), batch, layers, processes
        self.is_host = rng.random() < 0.4
        machine = Machine(
            h2d_bytes_per_s=2e6 * factor(), d2h_bytes_per_s=2e6 * factor(), host_update_ns=500 * factor(),
            device_update_ns=30, copy_s=1e-4,
        )  # fmt: skip
        machine = replace(machine, disk_read_bytes_per_s=3e6 * factor(), disk_write_bytes_per_s=2e6 * factor())
        self.machine = share_of(machine, processes, is_host=self.is_host)
        self.message_s, self.bytes_per_s = rng.choice((0, 1e-3)), 1e7 * factor()
        self.small_s = rng.choice((0, 1e-3))  # what any pass takes, however few samples it has
        self.memory_bytes = float("inf")

    def layers_of(self, samples, states):
        state_bytes = {"fp32": 8, "8bit": 2}[states]
        return [
            LayerCost(
                forward_s=(own := n * samples * 1e-6 + self.small_s + self.head_s * samples * (i == self.layers - 1)),
                backward_s=2 * own,
                weight_bytes=(6 + state_bytes) * n,
                activation_bytes=2 * n * samples,
                input_bytes=1000 * samples,
            )
            for i, n in enumerate(self.elements)
        ]

    def moved(self, replicas):
        return [OffloadedLayer(slot_bytes=2 * n, gradient_bytes=2 * n, elements=n // replicas) for n in self.elements]

    def work_of(self, choice):
        samples = self.batch // choice.replicas // choice.micro_batches
        layers = self.layers_of(samples, choice.states)
        rates = {"message_s": self.message_s, "bytes_per_s": self.bytes_per_s}
        offloaded = None
        if choice.window is not None:
            offloaded = OffloadedStages(
                window=choice.window,
                layers=self.moved(choice.replicas),
                machine=reduced(self.machine, choice.replicas, **rates),
                disk=None if choice.store == "ram" else self.disk(choice),
            )
        return StagedWork(
            layers=layers,
            pipeline=choice.pipeline,
            memory_bytes=self.memory_bytes,
            is_kept=choice.is_kept,
            link_s=[self.message_s + 1000 * samples / self.bytes_per_s] * self.layers,
            offloaded=offloaded,
            update_s=[n * self.machine.device_update_ns * 1e-9 for n in self.elements] if offloaded is None else (),
            shared_s=0.001,
        )

    def disk(self, choice):
        state_bytes = {"fp32": 8, "8bit": 2}[choice.states]
        return StageDisk(
            window=choice.window,
            layers=[OnDisk(2 * n, (4 + state_bytes) * n) for n in self.elements],
            machine=self.machine,
            replicas=choice.replicas,
            staged=not self.is_host,
        )

    def host_bytes(self, choice, step):
        """The fullest process's of what is not on the device, shared by its replicas."""
        if choice.window is None:
            return {"host": 0}
        if choice.store != "ram":
            return {"host": 0}
        sizes = [stage.layers for stage in step.partition.stages]
        firsts = [stage.first for stage in step.partition.stages]
        fullest = max(sum(self.elements[a : a + n]) for a, n in zip(firsts, sizes, strict=True))
        return {"host": (4 + {"fp32": 8, "8bit": 2}[choice.states]) * fullest // choice.replicas}


def space_of(row, **changes):
    return StagedSpace(**{"layers": row.layers, "batch": row.batch, "windows": range(1, row.layers + 1), **changes})


def every_choice(space, replicas, processes):
    for choice in space.choices(replicas, processes):
        windows = [None] if choice.window is None else range(1, space.layers - choice.stages + 2)
        yield from (choice._replace(window=window) for window in windows)


def placed(row, choice, limits):
    """Returns the step of a choice, None where it does not fit."""
    try:
        step = staged_step(row.work_of(choice))
    except BudgetError:
        return None
    return step if all(row.host_bytes(choice, step)[name] <= limit for name, limit in limits.items()) else None


def case(seed):
    rng = random.Random(seed)
    processes = rng.choice((2, 3, 4, 4, 6))
    row = Row(seed, layers=rng.randint(max(2, processes), 9), processes=processes, batch=rng.choice((2, 6, 8, 12)))
    stores = rng.choice((("ram",), ("ram", "disk")))
    states = rng.choice((("fp32",), ("fp32", "8bit")))
    space = space_of(row, states=states, may_stay=rng.random() < 0.7, stores=stores)
    splits = [
        (replicas, processes // replicas)
        for replicas in range(1, processes)
        if processes % replicas == 0 and row.batch % replicas == 0
    ]
    choices = [one for split in splits for one in every_choice(space, *split)]
    needed = [needed_bytes(row.work_of(one)) for one in choices]
    row.memory_bytes = min(needed) * rng.uniform(0.9, 1.0) + rng.uniform(0, 0.6) * (max(needed) - min(needed))
    host = max(sum(row.elements) * 12 // processes, 1)
    return row, space, splits, {"device": int(row.memory_bytes)}, {"host": int(host * rng.uniform(0.5, 2.5))}, choices


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=() if block == 2 else pytest.mark.long) for block in range(8)]
)
def test_the_choice_over_stages_and_replicas_is_within_three_percent_of_the_best_of_all(block):
    worse, filled = [], 0
    for seed in range(10 * block, 10 * block + 10):
        row, space, splits, device, host, choices = case(seed)
        choices += [one._replace(is_kept=None) for one in choices if not one.is_kept and one.per_process == 1]
        found = [search_stages(space, *split, row.work_of, row.host_bytes, {**device, **host}).plan for split in splits]
        steps = [step for one in choices if (step := placed(row, one, host)) is not None]
        plans = [plan for plan in found if plan is not None]
        assert bool(plans) == bool(steps)
        if not steps:
            continue
        assert all(placed(row, plan.choice, host) is not None for plan in plans)
        worse.append(min(plan.step.step_s for plan in plans) / min(step.step_s for step in steps) - 1)
        filled += any(plan.choice.is_kept is None for plan in plans)
    assert filled
    assert max(worse) <= 0.03, sorted(worse)
    assert min(worse) >= -1e-12


@pytest.mark.parametrize("seed", seeds(20, 7))
def test_the_timeline_of_a_step_is_what_each_process_does_in_it(seed):
    row, space, splits, device, host, _ = case(seed)
    for split in splits:
        plan = search_stages(space, *split, row.work_of, row.host_bytes, {**device, **host}).plan
        if plan is None:
            continue
        work, step, pipeline = row.work_of(plan.choice), plan.step, plan.choice.pipeline
        spans = spans_of(work, step)
        lanes = {f"process {n}": [] for n in range(pipeline.devices)}
        for span in spans:
            lanes[span.lane].append(span)
        for lane, own in lanes.items():
            assert all(one.end_s <= other.begin_s + 1e-9 for one, other in pairwise(own)), lane
        passes = [span for span in spans if span.name.startswith(("forward", "backward"))]
        assert (
            len(passes) == len({(one.lane, one.name) for one in passes}) == 2 * pipeline.stages * pipeline.micro_batches
        )
        assert sum(one.end_s - one.begin_s for one in passes) == pytest.approx(sum(step.simulation.busy_s))
        assert max(span.end_s for span in spans) == pytest.approx(step.step_s)


@pytest.mark.parametrize("seed", seeds(40, 15))
def test_no_cut_makes_a_step_shorter_than_its_bound(seed):
    rng = random.Random(seed)
    row = Row(seed, layers=rng.randint(3, 7), processes=4, batch=8)
    space = space_of(row, stores=("ram", "disk"))
    for choice in rng.sample([*every_choice(space, 2, 2), *every_choice(space, 1, 3)], 16):
        work = row.work_of(choice)
        cuts = combinations(range(1, row.layers), choice.stages - 1)
        steps = [
            staged_step(work, [b - a for a, b in zip((0, *ends), (*ends, row.layers), strict=True)]).step_s
            for ends in cuts
        ]
        assert 0 < staged_bound_s(work) <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(60, 15))
def test_no_cut_makes_a_step_shorter_than_its_bound_where_links_take_long(seed):
    """Links that differ; and of one micro-batch the step is the bound."""
    rng = random.Random(seed)
    row, stages = Row(seed, layers=rng.randint(3, 7), processes=4, batch=8), rng.randint(2, 3)
    for choice in rng.sample([*every_choice(space_of(row), 1, stages)], 8):
        work = replace(row.work_of(choice), link_s=[rng.uniform(0, rng.choice((0.01, 1))) for _ in range(row.layers)])
        steps = [
            staged_step(work, [b - a for a, b in pairwise((0, *ends, row.layers))]).step_s
            for ends in combinations(range(1, row.layers), choice.stages - 1)
        ]
        bound_s = staged_bound_s(work)
        assert staged_bound_s(replace(work, link_s=[0.0] * row.layers)) <= bound_s <= min(steps) * (1 + 1e-9)
        if choice.micro_batches == 1 and choice.window is None and choice.per_process == 1:
            through = replace(work, update_s=[0.0] * row.layers, link_s=[0.5] * row.layers)
            assert staged_bound_s(through) == pytest.approx(staged_step(through).step_s)


@pytest.mark.parametrize("seed", seeds(60, 15))
def test_a_row_fits_exactly_where_a_partition_does_and_so_many_bytes_do(seed):
    row, _, _, _, _, choices = case(seed)
    for choice in random.Random(seed).sample(choices, min(15, len(choices))):
        work = row.work_of(choice)
        assert fits(work) == (placed(row, choice, {}) is not None)
        row.memory_bytes, before = needed_bytes(work), row.memory_bytes
        assert placed(row, choice, {}) is not None
        row.memory_bytes = before


@pytest.mark.parametrize("block", range(6))
def test_a_row_whose_layers_inputs_differ_fits_exactly_where_one_of_all_partitions_does(block):
    looked_at = set()
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        count = rng.randint(3, 6)
        stages = rng.randint(2, min(4, count))
        layers = [
            LayerCost(
                forward_s=1,
                backward_s=1,
                weight_bytes=rng.randint(1, 30),
                activation_bytes=(input_bytes := rng.choice((1, 10, 30))) + rng.randint(0, 10),
                input_bytes=input_bytes,
            )
            for _ in range(count)
        ]
        moved = [OffloadedLayer(slot_bytes=rng.randint(1, 30), root_bytes=rng.choice((0, 20))) for _ in range(count)]
        work = StagedWork(
            layers=layers,
            pipeline=Pipeline(schedule="1F1B", devices=stages, micro_batches=stages + rng.randint(0, 3)),
            memory_bytes=float("inf"),
            is_kept=rng.random() < 0.5,
            link_s=[0.0] * count,
            offloaded=OffloadedStages(window=2, layers=moved) if rng.random() < 0.5 else None,
        )
        partitions = [(0, *cuts, count) for cuts in combinations(range(1, count), stages - 1)]
        least = min(
            max(int(work.costs.runs(n, *ends).least_bytes()) for n, ends in enumerate(pairwise(cuts)))
            for cuts in partitions
        )
        for limit in (least - 1, least, least + 5, least + 20):
            assert fits(replace(work, memory_bytes=limit)) == (limit >= least), (seed, limit, least)
            looked_at.add(limit >= least and not furthest(work.costs, [limit] * stages))
    assert looked_at == {False, True}


def test_of_a_long_row_only_some_partitions_are_looked_at(monkeypatch):
    """The third layer fits no stage but the last, where two are, and the first two layers would fit the first stage."""
    layers = [
        LayerCost(forward_s=1, backward_s=1, weight_bytes=w, activation_bytes=a, input_bytes=10)
        for w, a in ((2, 16), (7, 12), (15, 20), (3, 12))
    ]
    pipeline = Pipeline(schedule="1F1B", devices=3, micro_batches=4)
    work = StagedWork(layers=layers, pipeline=pipeline, memory_bytes=127, is_kept=False, link_s=[0.0] * 4)
    assert fits(work)
    assert [stage.layers for stage in staged_step(work).partition.stages] == [1, 1, 2]
    monkeypatch.setattr("stronghold.planner.staged_step.LOOKED_AT", 3 * 4**2 - 1)
    assert not fits(work)


@pytest.mark.parametrize("seed", seeds(20, 7))
def test_what_was_refused_does_not_fit_and_may_be_better(seed):
    row, space, splits, device, host, _ = case(seed)
    for split in splits:
        found = search_stages(space, *split, row.work_of, row.host_bytes, {**device, **host})
        assert found.plan is not None or found.refused
        for one in found.refused:
            assert placed(row, one.choice, host) is None
            assert one.needed_bytes > one.limit_bytes == {**device, **host}[one.place]
            if found.plan is not None:
                assert staged_bound_s(row.work_of(one.choice)) < found.plan.step.step_s


def test_only_what_is_allowed_is_chosen():
    row = Row(0, layers=6, processes=2, batch=8)
    space = space_of(row, windows=(2,), may_stay=False, kepts=(True,), states=("8bit",))
    plan = search_stages(space, 1, 2, row.work_of, row.host_bytes, {"device": 10**9}).plan
    assert plan.choice._replace(micro_batches=0) == (1, 2, 1, 0, True, "8bit", 2, "ram")
    assert plan.choice.stages == len(plan.step.partition.stages) == 2


def test_of_a_thousand_layers_over_32_processes_few_cuts_and_few_stages_are_looked_at(monkeypatch):
    """A single cut of them into 32 stages, looked at in whole, has 15 million stages."""
    row = Row(0, layers=1000, processes=32, batch=64)
    row.memory_bytes = 14 * sum(row.elements) / 40
    row.layers_of, row.moved = cache(row.layers_of), cache(row.moved)
    space, cuts, stages = space_of(row, states=("fp32", "8bit")), [], []
    step, runs = staged_search.staged_step, StageCosts.runs
    monkeypatch.setattr(staged_search, "staged_step", lambda *of: cuts.append(of[0]) or step(*of))
    monkeypatch.setattr(StageCosts, "runs", lambda *of: stages.append(np.broadcast(*of[2:]).size) or runs(*of))
    for split in ((1, 32), (4, 8), (16, 2)):
        plan = search_stages(space, *split, row.work_of, row.host_bytes, {"device": int(row.memory_bytes)}).plan
        assert plan is not None
        sizes = [stage.layers for stage in plan.step.partition.stages] if plan.choice.is_kept is None else None
        assert plan.step == step(row.work_of(plan.choice), sizes)
    assert len(cuts) <= 70
    assert sum(stages) <= 10**7
