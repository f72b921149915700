"""Partitions against brute force over every cut and every recomputation, against literals, and what is refused."""

import functools
import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.errors import BudgetError
from stronghold.planner.machine_file import Spread
from stronghold.planner.partition import partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.stage_costs import LayerCost, ratio_of, recomputed_layers


def pipeline_of(stages, micro_batches=8, schedule="1F1B"):
    return Pipeline(schedule=schedule, devices=stages, micro_batches=micro_batches)


def row(*times_s, weight_bytes=0, activation_bytes=0, input_bytes=0):
    """Layers that take each of ``times_s`` forward and twice as much backward."""
    return [
        LayerCost(
            forward_s=time_s,
            backward_s=2 * time_s,
            weight_bytes=weight_bytes,
            activation_bytes=activation_bytes,
            input_bytes=input_bytes,
        )
        for time_s in times_s
    ]


def sizes(found):
    return [stage.layers for stage in found.stages]


def peak_bytes(layers, first, end, recomputed, held, buffered):
    """A stage's peak as the docstring has it, summed layer by layer."""
    kept, again = layers[first : end - recomputed], layers[end - recomputed : end]
    received = buffered * (layers[first].input_bytes if first else 0)
    received += buffered * (layers[end].input_bytes if end < len(layers) else 0)
    return (
        sum(layer.weight_bytes for layer in kept + again)
        + held * (sum(layer.activation_bytes for layer in kept) + sum(layer.input_bytes for layer in again))
        + max((layer.activation_bytes for layer in again), default=0)
        + received
    )


def time_s(layers, first, end, recomputed):
    again_s = sum(layer.forward_s for layer in layers[end - recomputed : end])
    return sum(layer.forward_s + layer.backward_s for layer in layers[first:end]) + again_s


def every_partition(layers, held, ratios, buffered):
    """Yields (seconds of each stage, bytes of each stage) of every cut with every recomputation."""
    count = len(held)
    for inner in itertools.combinations(range(1, len(layers)), count - 1):
        ends = list(itertools.pairwise([0, *inner, len(layers)]))
        choices = [
            range(end - first + 1) if ratios is None else [math.floor(ratios[stage] * (end - first))]
            for stage, (first, end) in enumerate(ends)
        ]
        for chosen in itertools.product(*choices):
            stages = list(zip(ends, chosen, held, strict=True))
            yield (
                [time_s(layers, *run, recomputed) for run, recomputed, _ in stages],
                [peak_bytes(layers, *run, recomputed, kept, buffered) for run, recomputed, kept in stages],
            )


layer_costs = st.builds(
    LayerCost,
    forward_s=st.integers(0, 4),
    backward_s=st.integers(0, 6),
    weight_bytes=st.integers(0, 9),
    activation_bytes=st.integers(0, 9),
    input_bytes=st.integers(0, 5),
)


@st.composite
def cases(draw, most_layers=7):
    layers = draw(st.lists(layer_costs, min_size=1, max_size=most_layers))
    schedule = draw(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]))
    stages = draw(st.integers(1, min(4 if most_layers < 8 else 6, len(layers))))
    per_device = draw(st.sampled_from([1, stages])) if schedule == "Interleaved1F1B" else 1
    devices = stages // per_device
    micro_batches = devices * draw(st.integers(1, 3))
    pipeline = Pipeline(schedule=schedule, devices=devices, micro_batches=micro_batches, stages_per_device=per_device)
    limit = st.integers(0, 120)
    limits = draw(st.none() | limit | st.lists(limit, min_size=stages, max_size=stages))
    quarters = st.sampled_from([0, 0.25, 0.5, 1])
    ratios = draw(st.none() | st.lists(quarters, min_size=stages, max_size=stages))
    return layers, pipeline, limits, ratios, draw(st.booleans())


def fitting(case):
    """The brute force's partitions within the case's memory, and by how many bytes each of all is over it at most."""
    layers, pipeline, limits, ratios, receive_buffers = case
    limits = limits if isinstance(limits, list) else [math.inf if limits is None else limits] * pipeline.stages
    found, over = [], []
    for times, peaks in every_partition(
        layers, pipeline.held(), ratios, pipeline.micro_batches if receive_buffers else 0
    ):
        over.append(max(peak - limit for peak, limit in zip(peaks, limits, strict=True)))
        if over[-1] <= 0:
            found.append((times, peaks))
    return found, over


def best_of_each_cut(case):
    """Returns the least slowest stage of each cut that fits the memory, recomputing as little as does."""
    layers, pipeline, limits, ratios, receive_buffers = case
    limits = limits if isinstance(limits, list) else [math.inf if limits is None else limits] * pipeline.stages
    held, buffered = pipeline.held(), pipeline.micro_batches if receive_buffers else 0
    found = {}
    for inner in itertools.combinations(range(1, len(layers)), pipeline.stages - 1):
        times = []
        for stage, (first, end) in enumerate(itertools.pairwise([0, *inner, len(layers)])):
            counts = range(end - first + 1) if ratios is None else [math.floor(ratios[stage] * (end - first))]
            fits = [k for k in counts if peak_bytes(layers, first, end, k, held[stage], buffered) <= limits[stage]]
            times += [time_s(layers, first, end, min(fits))] if fits else [math.inf]
        if max(times) < math.inf:
            found[tuple(b - a for a, b in itertools.pairwise([0, *inner, len(layers)]))] = max(times)
    return found


def arguments(case):
    layers, pipeline, limits, ratios, receive_buffers = case
    settings = {"memory_bytes": limits, "recompute_ratio": ratios, "receive_buffers": receive_buffers}
    return (layers, pipeline), settings


def check(case, found):
    """Holds a partition to what it says of itself, and its stages to their memory."""
    layers, pipeline, limits, ratios, receive_buffers = case
    buffered = pipeline.micro_batches if receive_buffers else 0
    assert sum(sizes(found)) == len(layers) and min(sizes(found)) >= 1
    assert [stage.first for stage in found.stages] == [0, *itertools.accumulate(sizes(found))][:-1]
    for number, (stage, held) in enumerate(zip(found.stages, pipeline.held(), strict=True)):
        run = stage.first, stage.first + stage.layers, stage.recomputed
        assert stage.memory_bytes == peak_bytes(layers, *run, held, buffered)
        assert stage.time_s == time_s(layers, *run)
        assert stage.memory_bytes <= (limits[number] if isinstance(limits, list) else limits or math.inf)
        if ratios is not None:
            assert stage.recomputed == math.floor(ratios[number] * stage.layers)
    assert found.ideal_s == sum(layer.forward_s + layer.backward_s for layer in layers) / pipeline.stages


@settings(max_examples=3000)
@given(cases())
def test_balance_by_time_is_the_least_slowest_stage_of_all(case):
    possible, over = fitting(case)
    positional, named = arguments(case)
    if not possible:
        with pytest.raises(BudgetError, match=f"give each {min(over)} bytes more"):
            partition(*positional, **named)
        return
    found = partition(*positional, **named)
    check(case, found)
    assert found.slowest_s == min(max(times) for times, _ in possible)


@settings(max_examples=1000)
@given(cases())
def test_balance_by_memory_is_the_least_fullest_stage_and_then_the_least_slowest(case):
    possible, _ = fitting(case)
    positional, named = arguments(case)
    if not possible:
        with pytest.raises(BudgetError):
            partition(*positional, balance="memory", **named)
        return
    found = partition(*positional, balance="memory", **named)
    check(case, found)
    fullest = min(max(peaks) for _, peaks in possible)
    assert max(stage.memory_bytes for stage in found.stages) == fullest
    assert found.slowest_s == min(max(times) for times, peaks in possible if max(peaks) <= fullest)


@settings(max_examples=300)
@given(cases(), st.data())
def test_a_given_partition_recomputes_as_little_as_fits(case, data):
    layers, pipeline, limits, ratios, receive_buffers = case
    inner = data.draw(st.permutations(range(1, len(layers))))[: pipeline.stages - 1]
    given_sizes = [end - first for first, end in itertools.pairwise([0, *sorted(inner), len(layers)])]
    positional, named = arguments(case)
    try:
        found = partition(*positional, balance=given_sizes, **named)
    except BudgetError as error:
        stage = int(str(error).split("(stage ")[1].split(",")[0])
    else:
        check(case, found)
        assert sizes(found) == given_sizes
        stage = None
    held, buffered = pipeline.held(), pipeline.micro_batches if receive_buffers else 0
    for number, (first, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(given_sizes)])):
        limit = limits[number] if isinstance(limits, list) else math.inf if limits is None else limits
        counts = range(end - first + 1) if ratios is None else [math.floor(ratios[number] * (end - first))]
        fits = [k for k in counts if peak_bytes(layers, first, end, k, held[number], buffered) <= limit]
        if stage is None:
            assert found.stages[number].recomputed == min(fits)
        elif number <= stage:
            assert bool(fits) == (number < stage)


def textbook(case, balance):
    """Returns (layers, recomputed) of each stage by dynamic programming, a stage and a beginning at a time.

    Of beginnings that are as good the first is taken. None where nothing fits.
    """
    layers, pipeline, limits, ratios, receive_buffers = case
    stages, held, buffered = pipeline.stages, pipeline.held(), pipeline.micro_batches if receive_buffers else 0
    limits = limits if isinstance(limits, list) else [math.inf if limits is None else limits] * stages

    def peaks(stage, first, end):
        counts = range(end - first + 1) if ratios is None else [math.floor(ratios[stage] * (end - first))]
        return {k: peak_bytes(layers, first, end, k, held[stage], buffered) for k in counts}

    def fewest(stage, first, end):
        return min((k for k, peak in peaks(stage, first, end).items() if peak <= limits[stage]), default=None)

    def least_bytes(stage, first, end):
        least = min(peaks(stage, first, end).values())
        return least if least <= limits[stage] else math.inf

    def seconds(stage, first, end):
        recomputed = fewest(stage, first, end)
        return math.inf if recomputed is None else time_s(layers, first, end, recomputed)

    def best(cost):
        @functools.cache
        def found(stage, end):
            if stage < 0:
                return (-math.inf if end == 0 else math.inf), None
            firsts = range(stage, end)
            worst = [max(found(stage - 1, first)[0], cost(stage, first, end)) for first in firsts]
            return min(zip(worst, firsts, strict=True), default=(math.inf, None))

        cuts = [len(layers)]
        for stage in reversed(range(stages)):
            cuts.append(found(stage, cuts[-1])[1])
        return found(stages - 1, len(layers))[0], cuts[::-1]

    if balance == "memory":
        fullest = best(least_bytes)[0]
        limits = [min(limit, fullest) for limit in limits]
    slowest_s, cuts = best(seconds)
    if slowest_s == math.inf:
        return None
    return [(b - a, fewest(stage, a, b)) for stage, (a, b) in enumerate(itertools.pairwise(cuts))]


@settings(max_examples=1000, deadline=None)
@given(cases(most_layers=16), st.sampled_from(["time", "memory"]))
def test_stages_are_those_of_the_textbook_and_of_several_as_good_the_first(case, balance):
    expected = textbook(case, balance)
    positional, named = arguments(case)
    if expected is None:
        with pytest.raises(BudgetError):
            partition(*positional, balance=balance, **named)
        return
    found = partition(*positional, balance=balance, **named)
    assert [(stage.layers, stage.recomputed) for stage in found.stages] == expected


@settings(max_examples=500, deadline=None)
@given(cases(), st.data())
def test_no_cut_is_moved_for_less_than_the_spread(case, data):
    layers, pipeline, limits, ratios, receive_buffers = case
    spreads = data.draw(st.lists(st.integers(0, 2), min_size=len(layers), max_size=len(layers)))
    layers = [
        replace(layer, forward_measured_s=Spread(layer.forward_s - 0.25, layer.forward_s, layer.forward_s + n))
        for layer, n in zip(layers, spreads, strict=True)
    ]
    near = data.draw(st.none() | st.permutations(range(1, len(layers))))
    inner = None if near is None else sorted(near[: pipeline.stages - 1])
    near = None if inner is None else [b - a for a, b in itertools.pairwise([0, *inner, len(layers)])]
    case = layers, pipeline, limits, ratios, receive_buffers
    positional, named = arguments(case)
    possible = best_of_each_cut(case)
    if not possible:
        return
    found = partition(*positional, near=near, **named)
    total_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    spread = sum(n + 0.25 for n in spreads) / total_s if total_s else 0
    assert found.spread == pytest.approx(spread)
    check(case, found)
    if not total_s:
        return
    equal = [len(layers) // pipeline.stages + (n < len(layers) % pipeline.stages) for n in range(pipeline.stages)]
    wanted = [*itertools.accumulate(near or equal)]

    def moved(cut_sizes):
        return sum(abs(a - b) for a, b in zip(itertools.accumulate(cut_sizes), wanted, strict=True))

    most_s = (1 + spread) * min(possible.values()) * (1 + 1e-12)
    assert found.slowest_s <= most_s
    assert moved(sizes(found)) == min(moved(cut) for cut, slowest_s in possible.items() if slowest_s <= most_s)
    # each stage's own is that of the layers it computes, and once more of those it computes again
    for stage in found.stages:
        again = range(stage.first + stage.layers - stage.recomputed, stage.first + stage.layers)
        own = [*range(stage.first, stage.first + stage.layers), *again]
        assert stage.spread_s == pytest.approx(sum(spreads[n] + 0.25 for n in own))


def test_a_thousand_layers_over_32_devices_are_cut_in_less_than_ten_seconds():
    draw = random.Random(0).randrange
    layers = [
        LayerCost(
            forward_s=draw(90, 110),
            backward_s=draw(180, 220),
            weight_bytes=draw(900, 1100),
            activation_bytes=draw(90, 110),
            input_bytes=10,
        )
        for _ in range(1000)
    ]
    began_s = time.process_time()
    found = partition(layers, pipeline_of(32, 64), memory_bytes=70_000, receive_buffers=True)
    assert time.process_time() - began_s < 10
    assert max(stage.recomputed for stage in found.stages) > 0 and found.over_ideal < 0.2


def test_what_a_partition_tells():
    found = partition(row(1, 1, 1, 1, 2), pipeline_of(2))
    assert sizes(found) == [3, 2]
    assert [stage.time_s for stage in found.stages] == [9, 9]
    assert (found.slowest_s, found.ideal_s, found.over_ideal, found.idle_shares) == (9, 9, 0, [0, 0])
    uneven = partition(row(1, 1, 1, 1, 2), pipeline_of(2), balance=[4, 1])
    assert [stage.forward_s for stage in uneven.stages] == [4, 2]
    assert [stage.backward_s for stage in uneven.stages] == [8, 4]
    assert (uneven.slowest_s, uneven.over_ideal, uneven.idle_shares) == (12, 12 / 9 - 1, [0, 0.5])


def test_only_the_stage_that_holds_most_recomputes():
    """Of ten layers of 10 bytes, stage 0 holds two micro-batches: 100 bytes if it keeps five, of which 60 are there."""
    layers = row(*[1] * 10, activation_bytes=10, input_bytes=1)
    found = partition(layers, pipeline_of(2), balance=[5, 5], memory_bytes=60)
    # 2 · (2 · 10 + 3 · 1) + 10 = 56; with two recomputed 2 · (3 · 10 + 2 · 1) + 10 = 74
    assert [(stage.recomputed, stage.memory_bytes) for stage in found.stages] == [(3, 56), (0, 50)]
    assert [stage.backward_s for stage in found.stages] == [13, 10]
    # nine layers: stage 0 need not recompute three layers (15 + 3 s) if it gives one away
    best = partition(layers[:9], pipeline_of(2), memory_bytes=60)
    assert [(stage.layers, stage.recomputed, stage.time_s) for stage in best.stages] == [(4, 2, 14), (5, 0, 15)]


def test_layers_without_time_or_bytes():
    found = partition(row(0, 0, 0), pipeline_of(2), balance="memory", memory_bytes=0)
    assert (found.slowest_s, found.over_ideal, found.idle_shares) == (0, 0, [0, 0])


def test_a_large_row_is_cut_evenly():
    found = partition(row(*[1] * 128), pipeline_of(64, 64))
    assert sizes(found) == [2] * 64


@given(st.integers(1, 400), st.data())
def test_a_ratio_gives_its_layers_back(layers, data):
    recomputed = data.draw(st.integers(0, layers))
    ratio = ratio_of(recomputed, layers)
    assert recomputed_layers(ratio, layers) == recomputed and 0 <= ratio <= 1
    assert ratio == pytest.approx(recomputed / layers, rel=1e-15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 5}, "each stage needs at least one layer (got stages=5, layers=4); pass at most 4 stages"),
        ({"balance": "speed"}, "balance must be 'time', 'memory' or a list of numbers of layers (got 'speed')"),
        (
            {"balance": [2, 3]},
            "a partition must sum to the number of layers (got [2, 3], which sum to 5, layers=4); take away 1",
        ),
        (
            {"balance": [1, 1]},
            "a partition must sum to the number of layers (got [1, 1], which sum to 2, layers=4); add 2",
        ),
        (
            {"balance": [1, 1, 2]},
            "a partition must have a number of layers for each stage (got 3 in [1, 1, 2], stages=2); pass 2 numbers",
        ),
        (
            {"balance": [4, 0]},
            "a partition must be whole numbers of layers, none below 1 (got [4, 0]); give each stage one",
        ),
        (
            {"balance": [2.0, 2.0]},
            "a partition must be whole numbers of layers, none below 1 (got [2.0, 2.0]); give each stage one",
        ),
        (
            {"memory_bytes": [1]},
            "memory_bytes must be one number, or one for each of the 2 stages, none negative (got [1]); pass as many",
        ),
        (
            {"memory_bytes": -1},
            "memory_bytes must be one number, or one for each of the 2 stages, none negative (got -1); pass as many",
        ),
        (
            {"recompute_ratio": [0, 1.5]},
            "recompute_ratio must be one number, or one for each of the 2 stages, from 0 to 1 (got [0, 1.5]); "
            "pass as many",
        ),
    ],
)
def test_what_is_refused(settings, message):
    pipeline = pipeline_of(settings.pop("stages", 2))
    with pytest.raises(ValueError) as error:
        partition(row(1, 1, 1, 1), pipeline, **settings)
    assert str(error.value) == message
    assert not isinstance(error.value, BudgetError)


def test_no_partition_fits_the_memory():
    layers = row(*[1] * 4, weight_bytes=1000, activation_bytes=100, input_bytes=10)
    with pytest.raises(BudgetError) as error:
        partition(layers, pipeline_of(2, 4), memory_bytes=2048)
    # two layers each, all recomputed: 2 · 1000 + 2 · 2 · 10 + 100 = 2140 on stage 0
    assert str(error.value) == (
        "no partition of 4 layers into 2 stages fits the memory (got memory_bytes=2.00 KiB for each, and 1F1B with "
        "4 micro-batches, of which a stage holds up to 2); give each 92 bytes more (92 B), or pass more stages or "
        "smaller micro-batches"
    )
    assert sizes(partition(layers, pipeline_of(2, 4), memory_bytes=2140)) == [2, 2]


def test_a_given_partition_does_not_fit_the_memory():
    layers = row(*[1] * 4, weight_bytes=1000, activation_bytes=100, input_bytes=10)
    with pytest.raises(BudgetError) as error:
        partition(layers, pipeline_of(2, 4), balance=[1, 3], memory_bytes=2140)
    assert str(error.value) == (
        "each stage must fit its memory (stage 1, layers 1 to 3 with 1 micro-batches held, needs 3130 bytes, 3.06 KiB, "
        "and may take 2140); give it fewer layers, or pass balance='memory'"
    )


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_cost_that_is_no_cost(value):
    with pytest.raises(ValueError, match="backward_s must be a number of 0 or more"):
        LayerCost(forward_s=1, backward_s=value, weight_bytes=0, activation_bytes=0, input_bytes=0)
