"""Where a row is cut: against brute force over the costs that were measured, by files, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.distributed import partitioning
from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.offloaded_layers import offloaded_stages
from stronghold.distributed.partitioning import choose_stages
from stronghold.errors import ParallelError
from stronghold.planner.partition import partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.stage_costs import LayerCost
from tests.distributed.cases import residual
from tests.distributed.launched import launch
from tests.distributed.waiting import Waiting
from tests.planner import machines

CPU = torch.device("cpu")


def row_of(*layers):
    return LayeredSequential(nn.Sequential(*layers), loss=F.mse_loss)


def linear(count):
    return row_of(*(nn.Linear(4, 4) for _ in range(count)))


def pipeline_of(stages, micro_batches=4):
    return Pipeline(schedule="1F1B", devices=stages, micro_batches=micro_batches)


@pytest.fixture
def measured(monkeypatch):
    """Returns the list that the costs of the next measurement will be in, without their spread: the minimum counts."""
    costs = []

    def measure(*arguments, **settings):
        found = original(*arguments, **settings)
        costs.extend(replace(cost, forward_measured_s=None, backward_measured_s=None) for cost in found)
        return list(costs)

    original = partitioning.measure
    monkeypatch.setattr(partitioning, "measure", measure)
    return costs


def every_cut(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield list(itertools.pairwise([0, *inner, layers]))


def sizes_of(cut):
    return [end - first for first, end in cut]


@pytest.mark.parametrize(("activations", "again"), [(None, 1), ("recompute", 1), ("host", 1), ("keep", 0)])
def test_by_time_the_slowest_stage_is_the_fastest_of_all_partitions(measured, activations, again):
    row = row_of(*(Waiting(2 * wait, wait) for wait in (3, 1, 1, 2, 6, 2, 1)))
    sizes, recomputed, planned = choose_stages(
        row, pipeline_of(3), "time", inputs=torch.randn(8, 4), device=CPU, activations=activations
    )

    def slowest_s(cut):
        return max(
            sum((1 + again) * cost.forward_s + cost.backward_s for cost in measured[first:end]) for first, end in cut
        )

    assert slowest_s([*itertools.pairwise([0, *itertools.accumulate(sizes)])]) == pytest.approx(
        min(map(slowest_s, every_cut(7, 3))), rel=1e-9
    )
    assert recomputed is None
    # A stage computes for its micro-batches, and the last one's process waits for two forward passes at least.
    ends = itertools.pairwise([0, *itertools.accumulate(sizes)])
    for one, (first, end) in zip(planned, ends, strict=True):
        each_s = sum((1 + again) * cost.forward_s + cost.backward_s for cost in measured[first:end])
        assert one.computing_s == pytest.approx(4 * each_s)
    step_s = {one.computing_s + one.waiting_s for one in planned}
    assert max(step_s) == pytest.approx(min(step_s))
    assert planned[-1].waiting_s >= sum(cost.forward_s for cost in measured[: sizes[0] + sizes[1]])


class Clock:
    """A clock of a machine under load: for a while each second of work takes one of ``slowness``, and a tenth more."""

    def __init__(self, seed, slowness):
        self._draw, self._slownesses = random.Random(seed), slowness
        self.now_s = self._until_s = 0.0
        self._slowness = 1.0

    def __call__(self):
        return self.now_s

    def work(self, seconds):
        if self.now_s >= self._until_s:  # bursts of other work, as long as a few layers
            self._until_s = self.now_s + self._draw.expovariate(1 / 20)
            self._slowness = self._draw.choice(self._slownesses)
        self.now_s += seconds * self._slowness * self._draw.uniform(1, 1.1)


class Working(nn.Linear):
    """Takes so many seconds of a clock in each pass; ``name`` makes it a kind of its own, measured by itself."""

    def __init__(self, clock, seconds, name):
        super().__init__(4, 4)
        self.clock, self.seconds, self.name = clock, seconds, name

    def __deepcopy__(self, memo):
        copied = Working(self.clock, self.seconds, self.name)
        copied._parameters = {key: memo[id(value)] for key, value in self._parameters.items()}
        return copied

    def forward(self, x):
        return Working.Pass.apply(super().forward(x), self)

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer = layer
            layer.clock.work(layer.seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.layer.clock.work(ctx.layer.seconds)
            return gradient, None


LIGHT, HEAVY = (1, 1, 1.1), (1, 1, 1.5, 3)


@pytest.mark.parametrize(
    ("seconds", "slowness", "sizes"),
    [
        pytest.param([1, 1, 1, 1, 1, 1], HEAVY, [2, 2, 2], marks=pytest.mark.long),
        pytest.param([1, 1, 1, 1, 1, 1.1], HEAVY, [2, 2, 2], marks=pytest.mark.long),
        pytest.param([1, 1, 1, 1, 1, 1, 1], HEAVY, [3, 2, 2], marks=pytest.mark.long),
        ([1, 1, 1, 1, 1, 2], HEAVY, [2, 2, 2]),  # three seconds, as with [3, 2, 1]
        pytest.param([1, 1, 1, 1, 1, 2], LIGHT, [2, 2, 2], marks=pytest.mark.long),
        ([6, 1, 1, 1, 1, 1, 1, 1], LIGHT, [1, 5, 2]),  # seven seconds with [3, 3, 2]
    ],
)
def test_a_loaded_machine_cuts_as_one_that_is_not(monkeypatch, seconds, slowness, sizes):
    """Each layer is measured by itself, with noise of its own; eight times the same cuts come of it."""
    original, cuts, without = partitioning.measure, [], set()
    for seed in range(8):
        clock, found = Clock(seed, slowness), []

        def measure(*arguments, clock=clock, found=found, **settings):
            found.extend(original(*arguments, **settings, clock=clock))
            return found

        monkeypatch.setattr(partitioning, "measure", measure)
        row = row_of(*(Working(clock, one, name) for name, one in enumerate(seconds)))
        cuts.append(choose_stages(row, pipeline_of(3), "time", inputs=torch.randn(8, 4), device=CPU)[0])
        bare = [replace(cost, forward_measured_s=None, backward_measured_s=None) for cost in found]
        without.add(tuple(stage.layers for stage in partition(bare, pipeline_of(3), recompute_ratio=1).stages))
    assert cuts == [sizes] * 8
    if seconds[-1] == 2:
        assert len(without) > 1  # noise alone decides


class Heavy(nn.Linear):
    """Weighs as much as two of the wide layers' activations."""

    def __init__(self):
        super().__init__(4, 4)
        self.weighs = nn.Parameter(torch.zeros(2**14))


@pytest.mark.parametrize(("activations", "kept"), [("keep", True), ("recompute", False)])
def test_by_memory_the_fullest_stage_has_the_least_bytes_of_all_partitions(measured, activations, kept):
    wide = [nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4)) for _ in range(4)]
    row = row_of(*wide, *(Heavy() for _ in range(3)))
    order = pipeline_of(3)
    sizes, *_ = choose_stages(row, order, "memory", inputs=torch.randn(4 * 32, 4), device=CPU, activations=activations)

    def fullest_bytes(cut):
        peaks = []
        for held, (first, end) in zip(order.held(), cut, strict=True):
            layers = measured[first:end]
            activations_bytes = [cost.activation_bytes for cost in layers]
            peak = sum(cost.weight_bytes for cost in layers)
            peak += (
                held * sum(activations_bytes)
                if kept
                else held * sum(cost.input_bytes for cost in layers) + max(activations_bytes)
            )
            received = [measured[cut_at].input_bytes for cut_at in (first, end) if 0 < cut_at < len(measured)]
            peaks.append(peak + order.micro_batches * sum(received))
        return max(peaks)

    assert fullest_bytes([*itertools.pairwise([0, *itertools.accumulate(sizes)])]) == min(
        map(fullest_bytes, every_cut(7, 3))
    )


def test_with_a_window_stages_have_windows_and_wait_for_what_the_link_carries(measured):
    row = row_of(*(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 5000), nn.Linear(5000, 4), nn.Linear(4, 4))
    slow = machines.laptop(link={**machines.laptop().link, "h2d": machines.about(1e5)})
    named = {"inputs": torch.randn(8, 4), "device": CPU, "window": 2}
    by_time, *_ = choose_stages(row, pipeline_of(2), "time", machine=slow, **named)
    # The wide layers' 100 and 80 kB take 1 and 0.8 s, more than all else does. A stage of two layers keeps one of them
    # in its window; the other passes through the other stage's in forward passes alone, being the last one there.
    assert by_time == [10, 2]
    measured.clear()
    by_memory, *_ = choose_stages(row, pipeline_of(3), "memory", **named)
    offloaded = offloaded_stages(row, 2, device=CPU)
    received = [4 * cost.input_bytes for cost in measured] + [0]

    def fullest_bytes(cut):
        return max(
            offloaded.held_bytes(first, end)
            + held * sum(cost.input_bytes for cost in measured[first:end])
            + max(cost.activation_bytes for cost in measured[first:end])
            + (first and received[first])
            + (received[end] if end < 12 else 0)
            for held, (first, end) in zip(pipeline_of(3).held(), cut, strict=True)
        )

    assert fullest_bytes([*itertools.pairwise([0, *itertools.accumulate(by_memory)])]) == min(
        map(fullest_bytes, every_cut(12, 3))
    )


def test_one_micro_batch_is_measured_and_its_targets(measured):
    seen = []

    def loss(output, targets):
        seen.append((output.shape, targets.shape))
        return F.mse_loss(output, targets)

    row = LayeredSequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 3)), loss)
    choose_stages(row, pipeline_of(2), "time", inputs=torch.randn(12, 4), targets=torch.randn(12, 3), device=CPU)
    assert set(seen) == {((3, 3), (3, 3))}
    assert [cost.input_bytes for cost in measured] == [3 * 4 * 4, 3 * 4 * 4, 3 * 2 * 4]


@pytest.mark.parametrize(
    ("layers", "stages", "balance", "sizes"),
    [
        (7, 3, "layers", [3, 2, 2]),
        (7, 3, [1, 5, 1], [1, 5, 1]),
        (7, 3, (2, 2, 3), [2, 2, 3]),
        (3, 1, "time", [3]),
        (3, 3, "memory", [1, 1, 1]),
    ],
)
def test_what_leaves_nothing_to_choose_measures_nothing(measured, layers, stages, balance, sizes):
    assert choose_stages(linear(layers), pipeline_of(stages), balance, device=CPU) == (sizes, None, ())
    assert measured == []


@pytest.mark.parametrize(
    ("ratios", "given", "recomputed"),
    [
        ([1, 1], None, [4, 1]),
        ([0, 0.0], None, [0, 0]),
        ([0.5, 0.5], None, [2, 0]),
        ([0.74, 1], None, [2, 1]),
        ([0.75, 0], "recompute", [3, 0]),
        ([1, 0], "host", [4, 0]),
        ([0, 0], "recompute", [0, 0]),
        ([0.2, 0.9], "keep", [0, 0]),
    ],
)
@pytest.mark.parametrize("kind", [str, Path, lambda path: json.loads(path.read_text())], ids=["str", "Path", "object"])
def test_a_file_says_the_layers_and_how_many_are_recomputed(tmp_path, kind, ratios, given, recomputed):
    path = tmp_path / "partition.json"
    path.write_text(json.dumps({"partition": [4, 1], "recompute_ratio": ratios}))
    chosen = choose_stages(linear(5), pipeline_of(2), kind(path), device=CPU, activations=given)
    assert chosen == ([4, 1], recomputed, ())


@pytest.mark.parametrize(
    ("ratios", "given", "message"),
    [
        (
            [1, 1],
            "keep",
            "activations must be what the partition asks for .got activations='keep' and .* 5 of 5",
        ),
        ([0.3, 0], "keep", r"recompute_ratio=\[0.3, 0\] in '.*, by which 1 of 5 layers are recomputed\); leave one"),
        (
            [0, 0],
            "host",
            "activations must be what the partition asks for .got activations='host' and .* 0 of 5",
        ),
        ([0.2, 0.9], "host", "by which 0 of 5 layers are recomputed"),
    ],
)
def test_activations_that_contradict_a_file_are_refused(tmp_path, ratios, given, message):
    path = tmp_path / "partition.json"
    path.write_text(json.dumps({"partition": [4, 1], "recompute_ratio": ratios}))
    for told in (path, json.loads(path.read_text())):
        with pytest.raises(ParallelError, match=message if told == path else message.replace("'.*", "balance")):
            choose_stages(linear(5), pipeline_of(2), told, device=CPU, activations=given)


@pytest.mark.parametrize(
    ("balance", "inputs", "message"),
    [
        ("time", None, "balance='time' measures each layer with a batch like those .* pass it as inputs=, or"),
        ("memory", None, "balance='memory' measures each layer"),
        ("time", torch.zeros(6, 4), "must divide the batch .got a batch of 6 samples and 4 micro-batches.; pass"),
        ("tiem", None, "balance must be 'time', 'memory', 'layers', .* .got 'tiem', and there is no such file"),
        ({"partition": [4, 1]}, None, r"balance=\{'partition': .* must be an object of partition and recompute_ratio"),
        ({"partition": [4, 1], "recompute_ratio": [1, 2]}, None, r"from 0 to 1 \(got \[1, 2\]\); pass one such as"),
        ([3, 3], None, r"and 5 in all \(got \[3, 3\], which are 2 stages and 6 layers\)"),
        ([5, 0], None, r"each of 2 stages a layer or more, and 5 in all \(got \[5, 0\]"),
        ([2, 2, 1], None, r"which are 3 stages and 5 layers\); pass other numbers"),
    ],
)
def test_what_is_no_balance_is_refused(balance, inputs, message):
    with pytest.raises(ParallelError, match=message):
        choose_stages(linear(5), pipeline_of(2), balance, inputs=inputs, device=CPU)


def test_the_batch_that_is_measured_with_is_that_of_all_replicas(monkeypatch):
    taken, cost = [], LayerCost(forward_s=1, backward_s=2, weight_bytes=1, activation_bytes=1, input_bytes=1)
    monkeypatch.setattr(partitioning, "measure", lambda _, *batch, **__: taken.append(batch) or [cost] * 5)
    inputs, targets = torch.arange(48.0).reshape(24, 2), torch.arange(24)
    named = {"inputs": inputs, "targets": targets, "device": CPU, "replicas": 2}
    choose_stages(linear(5), pipeline_of(2), "time", **named)
    assert torch.equal(taken[0][0], inputs[:3]) and torch.equal(taken[0][1], targets[:3])
    rule = "got a batch of 12 samples and 4 micro-batches in each of 2 replicas.; pass a batch of a multiple of 8"
    with pytest.raises(ParallelError, match=rule):
        choose_stages(linear(5), pipeline_of(2), "time", **{**named, "inputs": inputs[:12]})


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ParallelError, match=r"got stages=3, layers=2\); pass at most 2 stages"):
        choose_stages(linear(2), pipeline_of(3), "time", device=CPU)


def balanced(folder: str) -> list[list[str]]:
    """Returns the names of this process's parameters, or the error, for one balance after another."""
    found = []
    path = Path(folder) / "partition.json"
    for balance, inputs in (("time", torch.randn(8, 3, 4)), (str(path), None), ("time", None)):
        model = residual()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        try:
            stages = stronghold.pipeline(
                model,
                loss=F.cross_entropy,
                stages=2,
                micro_batches=4,
                balance=balance,
                inputs=inputs,
                device="cpu",
            )
        except ParallelError as error:
            found.append([type(error).__name__, str(error.ours)])
        else:
            found.append([names[id(parameter)] for parameter in stages.parameters()])
    return found


def test_all_processes_cut_where_the_first_one_says(tmp_path):
    (tmp_path / "partition.json").write_text('{"partition": [2, 6], "recompute_ratio": [0, 0]}')
    first, second = launch("tests.distributed.test_partitioning", "balanced", 2, tmp_path, str(tmp_path))
    names = [name for name, _ in residual().named_parameters()]
    assert sorted(first[0] + second[0]) == sorted(names) and first[0] and second[0]
    boundary = {name.split(".")[0] for name in first[1]}, {name.split(".")[0] for name in second[1]}
    assert boundary == ({"1", "2"}, {"3", "4", "5", "6", "7", "9"})
    assert (first[2], second[2]) == (["ParallelError", "True"], ["ParallelError", "False"])
