"""Where a row is cut: against brute force over the costs that were measured, by files, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.distributed import partitioning
from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.partitioning import choose_stages
from stronghold.errors import ParallelError
from stronghold.planner.pipeline_order import Pipeline
from tests.distributed.cases import residual
from tests.distributed.launched import launch
from tests.distributed.waiting import Waiting

CPU = torch.device("cpu")


def row_of(*layers):
    return LayeredSequential(nn.Sequential(*layers), loss=F.mse_loss)


def linear(count):
    return row_of(*(nn.Linear(4, 4) for _ in range(count)))


def pipeline_of(stages, micro_batches=4):
    return Pipeline(schedule="1F1B", devices=stages, micro_batches=micro_batches)


@pytest.fixture
def measured(monkeypatch):
    """Returns the list that the costs of the next measurement will be in."""
    costs = []

    def measure(*arguments, **settings):
        costs.extend(original(*arguments, **settings))
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
    sizes, recomputed = choose_stages(
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
    sizes, _ = choose_stages(row, order, "memory", inputs=torch.randn(4 * 32, 4), device=CPU, activations=activations)

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
    assert choose_stages(linear(layers), pipeline_of(stages), balance, device=CPU) == (sizes, None)
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
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_says_the_layers_and_how_many_are_recomputed(tmp_path, kind, ratios, given, recomputed):
    path = tmp_path / "partition.json"
    path.write_text(json.dumps({"partition": [4, 1], "recompute_ratio": ratios}))
    chosen = choose_stages(linear(5), pipeline_of(2), kind(path), device=CPU, activations=given)
    assert chosen == ([4, 1], recomputed)


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
    with pytest.raises(ParallelError, match=message):
        choose_stages(linear(5), pipeline_of(2), path, device=CPU, activations=given)


@pytest.mark.parametrize(
    ("balance", "inputs", "message"),
    [
        ("time", None, "balance='time' measures each layer with a batch like those .* pass it as inputs=, or"),
        ("memory", None, "balance='memory' measures each layer"),
        ("time", torch.zeros(6, 4), "must divide the batch .got a batch of 6 samples and 4 micro-batches.; pass"),
        ("tiem", None, "balance must be 'time', 'memory', 'layers', .* .got 'tiem', and there is no such file"),
        ([3, 3], None, r"and 5 in all \(got \[3, 3\], which are 2 stages and 6 layers\)"),
        ([5, 0], None, r"each of 2 stages a layer or more, and 5 in all \(got \[5, 0\]"),
        ([2, 2, 1], None, r"which are 3 stages and 5 layers\); pass other numbers"),
    ],
)
def test_what_is_no_balance_is_refused(balance, inputs, message):
    with pytest.raises(ParallelError, match=message):
        choose_stages(linear(5), pipeline_of(2), balance, inputs=inputs, device=CPU)


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
