"""Stages whose layers pass a window: against sums layer by layer, every cut, and a step's schedule and bound."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.planner.offloaded_stages import RESOURCES, OffloadedLayer, OffloadedStages
from stronghold.planner.partition import partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.stage_costs import LayerCost
from stronghold.planner.stage_disk import OnDisk, StageDisk
from stronghold.planner.step import step_time
from stronghold.planner.step_bound import step_bound
from stronghold.planner.step_costs import LayerWork, Machine, StepSettings
from stronghold.schedule import Action, Computation, Schedule
from tests.crossed import seeds

MACHINE = Machine(h2d_bytes_per_s=2.0, d2h_bytes_per_s=4.0, host_update_ns=0.5e9, copy_s=0.25)
"""A fetch takes 0.25 s and half a second a byte, gradients a quarter, and an update half a second an element."""


def layer(forward_s=1, backward_s=2, activation_bytes=0, input_bytes=0):
    return LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_bytes=10**9,  # which no window has
        activation_bytes=activation_bytes,
        input_bytes=input_bytes,
    )


def disk_s(disk, first, end, forward_s, backward_s):
    """Returns the disk's seconds in (a forward pass, a backward pass, once a step)."""
    layers, window = disk.layers[first:end], disk.window
    read, write = (getattr(disk.machine, f"disk_{way}_bytes_per_s") for way in ("read", "write"))
    read_s = [one.weights / read for one in layers]
    beside = window == 1 and not disk.staged
    return (
        sum(read_s[window:]) + beside * forward_s,
        sum(read_s[: max(0, len(layers) - window)]) + beside * backward_s,
        sum(seconds for seconds, one in zip(read_s, layers, strict=True) if one.trained)
        + sum(one.updated for one in layers) / disk.replicas * (1 / read + 1 / write)
        + beside * forward_s,
    )


def pipeline_of(stages, micro_batches=4):
    return Pipeline(schedule="1F1B", devices=stages, micro_batches=micro_batches)


def times_s(layers, offloaded, first, end, again, micro_batches):
    """Returns (forward, backward, what holds it up) as the docstring has it, layer by layer."""
    numbers, machine, window = range(first, end), offloaded.machine, offloaded.window
    forward_s = sum(layers[n].forward_s for n in numbers)
    backward_s = sum(layers[n].backward_s for n in numbers)
    backward_s += sum(layers[n].forward_s for n in numbers[len(numbers) - again :])
    if machine is None:
        return forward_s, backward_s, {"computing"}
    moved = offloaded.layers
    fetch_s = [machine.copy_s + moved[n].slot_bytes / machine.h2d_bytes_per_s for n in numbers]
    down_s = sum(
        machine.copy_s + moved[n].gradient_bytes / machine.d2h_bytes_per_s for n in numbers if moved[n].gradient_bytes
    )
    fetched_s, refetched_s = sum(fetch_s[window:]), sum(fetch_s[: max(0, len(fetch_s) - window)])
    changed_s = sum(taken_s for n, taken_s in zip(numbers, fetch_s, strict=True) if moved[n].elements)
    if window == 1:
        fetched_s, refetched_s, changed_s = fetched_s + forward_s, refetched_s + backward_s, changed_s + forward_s
    update_s = sum(moved[n].elements for n in numbers) * machine.host_update_ns * 1e-9
    read_s = reread_s = once_s = 0
    if offloaded.disk is not None:
        read_s, reread_s, once_s = disk_s(offloaded.disk, first, end, forward_s, backward_s)
    forward = max(forward_s, fetched_s, read_s)
    late_s = max(0, update_s - forward, changed_s - forward, once_s - forward) / micro_batches
    by_disk = once_s > max(update_s, changed_s)
    over = {
        "computing": 0,
        "fetches": max(0, fetched_s - forward_s) + max(0, refetched_s - backward_s),
        "gradients": max(0, down_s - backward_s) if down_s > refetched_s else 0,
        "updates": 0 if by_disk else late_s,
        "disk": max(0, read_s - forward_s) + max(0, reread_s - backward_s) + (late_s if by_disk else 0),
    }
    return (
        forward + late_s,
        max(backward_s, refetched_s, down_s, reread_s),
        {name for name in RESOURCES if over[name] == pytest.approx(max(over.values()))},
    )


def held_bytes(offloaded, first, end):
    own = offloaded.layers[first:end]
    return (
        min(offloaded.window, len(own)) * max(one.slot_bytes for one in own)
        + offloaded.gradient_slots * max(one.gradient_bytes for one in own)
        + sum(one.root_bytes for one in own)
    )


def every_cut(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield list(itertools.pairwise([0, *inner, layers]))


few = st.integers(0, 6)
offloaded_layers = st.builds(OffloadedLayer, slot_bytes=few, gradient_bytes=few, root_bytes=few, elements=few)
layer_costs = st.builds(layer, forward_s=few, backward_s=few, activation_bytes=few, input_bytes=st.integers(0, 3))


on_disk = st.builds(OnDisk, few, few, st.booleans())


@st.composite
def disks_of(draw, window, layers):
    return StageDisk(
        window=window,
        layers=draw(st.lists(on_disk, min_size=layers, max_size=layers)),
        machine=replace(MACHINE, disk_read_bytes_per_s=3.0, disk_write_bytes_per_s=1.5),
        replicas=draw(st.integers(1, 2)),
        staged=draw(st.booleans()),
    )


@st.composite
def cases(draw):
    layers = draw(st.lists(layer_costs, min_size=1, max_size=8))
    moved = draw(st.lists(offloaded_layers, min_size=len(layers), max_size=len(layers)))
    window, machine = draw(st.integers(1, 4)), draw(st.none() | st.just(MACHINE))
    offloaded = OffloadedStages(
        window=window,
        layers=moved,
        gradient_slots=draw(st.integers(0, 2)),
        machine=machine,
        disk=None if machine is None else draw(st.none() | disks_of(window, len(layers))),
    )
    return layers, offloaded, pipeline_of(draw(st.integers(1, min(4, len(layers)))))


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from(["time", "memory"]), st.none() | st.integers(10, 60))
def test_the_least_of_every_cut_of_windows(case, balance, limit):
    layers, offloaded, order = case
    held = order.held()

    def peak(stage, first, end):
        inputs = sum(one.input_bytes for one in layers[first:end])
        largest = max(one.activation_bytes for one in layers[first:end])
        return held_bytes(offloaded, first, end) + held[stage] * inputs + largest

    def seconds(first, end):
        return sum(times_s(layers, offloaded, first, end, end - first, order.micro_batches)[:2])

    found_by_cut = [
        (max(peak(stage, *ends) for stage, ends in enumerate(cut)), max(seconds(*ends) for ends in cut))
        for cut in every_cut(len(layers), order.stages)
    ]
    fitting = [one for one in found_by_cut if limit is None or one[0] <= limit]
    if not fitting:
        with pytest.raises(ValueError, match="fits the memory"):
            partition(layers, order, balance=balance, offloaded=offloaded, memory_bytes=limit, recompute_ratio=1)
        return
    found = partition(layers, order, balance=balance, offloaded=offloaded, memory_bytes=limit, recompute_ratio=1)
    fullest = min(bytes_ for bytes_, _ in fitting) if balance == "memory" else math.inf
    assert found.slowest_s == pytest.approx(min(s for bytes_, s in fitting if bytes_ <= fullest), rel=1e-12)
    for number, one in enumerate(found.stages):
        ends = one.first, one.first + one.layers
        forward_s, backward_s, longest = times_s(layers, offloaded, *ends, one.layers, order.micro_batches)
        assert (one.forward_s, one.backward_s) == pytest.approx((forward_s, backward_s), rel=1e-12)
        assert one.longest in longest
        assert one.memory_bytes == peak(number, *ends)
    if balance == "memory":
        assert max(one.memory_bytes for one in found.stages) == fullest


def test_a_window_is_a_stage_s_weights_however_many_layers_it_has():
    """Whole stages would be cut 2 and 6: six layers of 10 bytes are as many as two of 30."""
    sizes = [30, 30, 10, 10, 10, 10, 10, 10]
    costs = [replace(layer(), weight_bytes=size) for size in sizes]
    moved = [OffloadedLayer(slot_bytes=size, root_bytes=5 * (n == 4)) for n, size in enumerate(sizes)]
    order = pipeline_of(2)
    whole = partition(costs, order, balance="memory")
    windows = partition(costs, order, balance="memory", offloaded=OffloadedStages(window=2, layers=moved))
    assert [stage.layers for stage in whole.stages] == [2, 6]
    assert [stage.memory_bytes for stage in whole.stages] == [60, 60]
    # two slots of 30 bytes are in one of the stages wherever the row is cut: four and four is the fastest
    assert [(stage.layers, stage.memory_bytes) for stage in windows.stages] == [(4, 2 * 30), (4, 2 * 10 + 5)]


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        # three layers through two slots: one fetch each way, of 0.25 + 9.5 s where computing takes 3 and 6
        ({"slot_bytes": 19}, (9.75, 9.75, "fetches")),
        ({"slot_bytes": 4}, (3, 6, "computing")),
        ({"slot_bytes": 4, "gradient_bytes": 11}, (3, 9, "gradients")),  # 3 x (0.25 + 2.75)
        ({"slot_bytes": 4, "elements": 10}, (3 + (15 - 3) / 4, 6, "updates")),
        ({"slot_bytes": 4, "elements": 1}, (3 + (3 * 2.25 - 3) / 4, 6, "updates")),  # all three are fetched anew
    ],
)
def test_what_holds_a_stage_up(moved, expected):
    offloaded = OffloadedStages(window=2, layers=[OffloadedLayer(**moved)] * 3, machine=MACHINE)
    (stage,) = partition([layer()] * 3, pipeline_of(1), offloaded=offloaded).stages
    assert (stage.forward_s, stage.backward_s, stage.longest) == expected
    assert stage.computing_s == 9


def test_a_slow_link_moves_layers_to_where_they_need_not_be_fetched():
    """Two layers of four seconds and four of two: three and three compute for as long, if nothing is fetched."""
    costs = [layer(4, 0)] * 2 + [layer(2, 0)] * 4
    moved = [OffloadedLayer(slot_bytes=2)] * 2 + [OffloadedLayer(slot_bytes=39)] * 4
    order = pipeline_of(2)
    assert [stage.layers for stage in partition(costs, order).stages] == [2, 4]
    link = OffloadedStages(window=3, layers=moved, machine=MACHINE)
    assert [stage.layers for stage in partition(costs, order, offloaded=link).stages] == [3, 3]


@pytest.mark.parametrize(("layers", "window"), [(5, 2), (6, 3), (4, 4), (3, 5), (7, 1)])
def test_passes_fetch_as_many_layers_as_the_schedule_does(layers, window):
    """One forward and one backward pass in turn, as in 1F1B: a pass is counted with the layers that it fetches."""
    schedule = Schedule(layers, min(window, layers))
    order = [Computation(n, False) for n in range(layers)] + [Computation(n, True) for n in reversed(range(layers))]
    schedule.follow(order)
    fetched = []
    for _ in range(4):
        moves = []
        for n in range(layers):
            moves += schedule.begin_forward(n, training=True, behind=range(n))
            moves += schedule.end_forward(returning=True)
        for n in reversed(range(layers)):
            moves += schedule.begin_backward(n, range(n - 1, -1, -1))
            moves += schedule.end_backward()
        fetched.append(sum(move.action is Action.FETCH for move in moves))
    counted = replace(MACHINE, h2d_bytes_per_s=1.0, copy_s=0.0)
    offloaded = OffloadedStages(window=window, layers=[OffloadedLayer(slot_bytes=1)] * layers, machine=counted)
    (stage,) = partition([layer(0, 0)] * layers, pipeline_of(1), offloaded=offloaded).stages
    assert stage.time_s == fetched[-1]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_with_one_micro_batch_it_is_the_bound_of_a_step_but_for_a_layer_at_its_ends(window):
    """The step's bound knows that the last layer is fetched behind its update, and its gradients come last."""
    moved = OffloadedLayer(slot_bytes=5, gradient_bytes=6, elements=3)
    work = LayerWork(forward_s=1, backward_s=3, weight_bytes=5, gradient_bytes=6, elements=3)
    bound = step_bound([work] * 6, MACHINE, StepSettings(window=window))
    offloaded = OffloadedStages(window=window, layers=[moved] * 6, machine=MACHINE)
    (stage,) = partition([layer()] * 6, pipeline_of(1, 1), offloaded=offloaded, recompute_ratio=1).stages
    layer_s = max(work.backward_s, MACHINE.copy_s + 6 / 4, MACHINE.copy_s + 5 / 2)
    assert bound.step_s - 2 * layer_s <= stage.time_s <= bound.step_s


@pytest.mark.parametrize("seed", seeds(40, 12))
def test_with_layers_on_disk_a_stage_takes_what_a_played_step_does(seed):
    """Of one micro-batch: no more, and at most 5 % less."""
    rng = random.Random(seed)
    count, window, elements = rng.randint(8, 24), rng.randint(1, 4), 20_000_000
    forward_s, weights, moments = rng.choice((0.001, 0.02, 0.1, 0.3)), 2 * elements, 10 * elements
    machine = Machine(
        h2d_bytes_per_s=25e9,
        d2h_bytes_per_s=25e9,
        host_update_ns=0.4,
        copy_s=8e-6,
        disk_read_bytes_per_s=3e9 * rng.uniform(0.3, 3),
        disk_write_bytes_per_s=2e9 * rng.uniform(0.3, 3),
    )
    work = LayerWork(
        forward_s=forward_s,
        backward_s=3 * forward_s,
        first_gradient_s=forward_s,
        weight_bytes=weights,
        gradient_bytes=weights,
        elements=elements,
        ring_bytes=weights + moments,
        on_disk=True,
    )
    played = step_time([work] * count, machine, StepSettings(window=window))
    offloaded = OffloadedStages(
        window=window,
        layers=[OffloadedLayer(slot_bytes=weights, gradient_bytes=weights, elements=elements)] * count,
        machine=machine,
        disk=StageDisk(
            window=window,
            layers=[OnDisk(weights, weights + moments)] * count,
            machine=machine,
        ),
    )
    costs = [layer(forward_s, 2 * forward_s)] * count
    (stage,) = partition(costs, pipeline_of(1, 1), offloaded=offloaded, recompute_ratio=1).stages
    assert 0.95 * played.step_s <= stage.time_s <= played.step_s * (1 + 1e-9)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"window must be a whole number of layers, 1 or more \(got 0\); pass one"):
        OffloadedStages(window=0, layers=[])
    with pytest.raises(ValueError, match=r"root_bytes must be a number of 0 or more \(got -1\); ask the model again"):
        OffloadedLayer(slot_bytes=1, root_bytes=-1)
    with pytest.raises(ValueError, match=r"an entry for each layer \(got 1 for 2 layers\); pass as many"):
        one = OffloadedStages(window=1, layers=[OffloadedLayer(slot_bytes=1)])
        partition([layer()] * 2, pipeline_of(1), offloaded=one)
