"""The simulation against closed formulas, and against the longest path through the passes found another way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.simulate import simulate


def exact(number):
    return pytest.approx(number, rel=1e-12)


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 8), st.integers(0, 12), st.integers(1, 9), st.integers(0, 9))
def test_the_bubble_of_equal_stages(schedule, devices, more, forward_s, backward_s):
    micro_batches = devices + more
    pipeline = Pipeline(schedule=schedule, devices=devices, micro_batches=micro_batches)
    found = simulate(pipeline, forward_s, backward_s)
    assert found.step_s == (micro_batches + devices - 1) * (forward_s + backward_s)
    assert found.bubble == exact((devices - 1) / (micro_batches + devices - 1))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
def test_the_bubble_of_equal_interleaved_stages(devices, rounds, stages_per_device, forward_s, backward_s):
    pipeline = Pipeline(
        schedule="Interleaved1F1B",
        devices=devices,
        micro_batches=rounds * devices,
        stages_per_device=stages_per_device,
    )
    found = simulate(pipeline, forward_s, backward_s)
    passes = stages_per_device * rounds * devices
    assert found.step_s == (passes + devices - 1) * (forward_s + backward_s)
    assert found.bubble == exact((devices - 1) / (passes + devices - 1))


@pytest.mark.parametrize(("micro_batches", "bubble"), [(10, 3 / (2 * 10 + 3)), (15, 3 / (2 * 15 + 3)), (3, 0.4)])
def test_torchs_interleaved_rounds_that_are_no_multiple_of_the_devices(micro_batches, bubble):
    """Rounds of five on four devices keep the formula; with fewer micro-batches than devices it is more than 3 / 9."""
    pipeline = Pipeline(schedule="Interleaved1F1B", devices=4, micro_batches=micro_batches, stages_per_device=2)
    assert simulate(pipeline, 1, 2).bubble == exact(bubble)


def test_stages_that_sleep_40_and_80_ms():
    one = simulate(Pipeline(schedule="1F1B", devices=4, micro_batches=8), 0.040, 0.080)
    assert one.step_s == exact(11 * 0.120)
    assert one.bubble == exact(3 / 11)  # 0.273
    assert one.busy_s == exact((8 * 0.120,) * 4)
    assert one.ends_s == exact((1.32, 1.24, 1.16, 1.08))  # each 80 ms before the one that its gradient goes to
    interleaved = Pipeline(schedule="Interleaved1F1B", devices=4, micro_batches=8, stages_per_device=2)
    assert simulate(interleaved, 0.020, 0.040).bubble == exact(3 / 19)  # 0.158


@pytest.mark.parametrize(
    ("schedule", "stages_per_device", "held"),
    [("GPipe", 1, (8, 8, 8, 8)), ("1F1B", 1, (4, 3, 2, 1)), ("Interleaved1F1B", 2, (11, 9, 7, 5))],
)
def test_what_a_device_holds_at_the_most(schedule, stages_per_device, held):
    pipeline = Pipeline(schedule=schedule, devices=4, micro_batches=8, stages_per_device=stages_per_device)
    assert simulate(pipeline, 1, 2).held == held


def test_passes_that_take_no_time_leave_no_bubble():
    found = simulate(Pipeline(schedule="GPipe", devices=2, micro_batches=2), 0, 0)
    assert (found.step_s, found.bubble) == (0, 0)


def test_a_slow_stage_is_what_the_others_wait_for():
    found = simulate(Pipeline(schedule="1F1B", devices=2, micro_batches=4), [1, 3], [2, 6])
    # 0F0, then device 1 without a pause until 1B3, then 0B3
    assert (found.step_s, found.busy_s) == (1 + 4 * 9 + 2, (12, 36))


def test_a_slow_link_is_a_queue():
    # 0F0 ends at 1 and 0F1 at 2; their activations take 5 each, one after the other: there at 6 and at 11
    found = simulate(Pipeline(schedule="GPipe", devices=2, micro_batches=2), 1, 1, 5)
    # 1B0 12 to 13, back at 18; 1B1 13 to 14, back at 23
    assert (found.step_s, found.ends_s) == (24, (24, 14))


def longest_path(pipeline, forward_s, backward_s, link_s):
    """When each device ends, by following from every pass and transfer to what must end before it begins."""
    orders = [list(pipeline.order(device)) for device in range(pipeline.devices)]
    times_s = {False: forward_s, True: backward_s}
    ends, transfers = {}, {}

    def there(this):
        """When the input of ``this`` is on its device."""
        stage, backward, micro_batch = this
        source = (stage + 1 if backward else stage - 1), backward, micro_batch
        sender = pipeline.device_of(source[0])
        if sender == pipeline.device_of(stage):
            return end(source)
        if this not in transfers:
            way = [x for x in orders[sender] if _receiver(pipeline, x) == pipeline.device_of(stage)]
            place = way.index(source)
            before = way[place - 1] if place else None
            free = there(_next(before)) if before else 0
            transfers[this] = max(end(source), free) + link_s[min(stage, source[0])]
        return transfers[this]

    def end(this):
        this = tuple(this)
        if this not in ends:
            stage, backward, _ = this
            order = orders[pipeline.device_of(stage)]
            place = order.index(this)
            begin = end(order[place - 1]) if place else 0
            if stage != (pipeline.stages - 1 if backward else 0):
                begin = max(begin, there(this))
            ends[this] = begin + times_s[backward][stage]
        return ends[this]

    return [end(order[-1]) for order in orders]


def _next(this):
    stage, backward, micro_batch = this
    return (stage - 1 if backward else stage + 1), backward, micro_batch


def _receiver(pipeline, this):
    stage = _next(this)[0]
    if not 0 <= stage < pipeline.stages or pipeline.device_of(stage) == pipeline.device_of(this[0]):
        return None
    return pipeline.device_of(stage)


@given(st.data())
def test_any_times_come_to_the_longest_path(data):
    schedule = data.draw(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]))
    devices = data.draw(st.integers(1, 4))
    pipeline = Pipeline(
        schedule=schedule,
        devices=devices,
        micro_batches=devices * data.draw(st.integers(1, 3)),
        stages_per_device=data.draw(st.integers(1, 3)) if schedule == "Interleaved1F1B" else 1,
    )
    times = [
        data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        for count in (pipeline.stages, pipeline.stages, pipeline.stages - 1)
    ]
    assert list(simulate(pipeline, *times).ends_s) == longest_path(pipeline, *times)


@pytest.mark.parametrize("stages", [512, pytest.param(1024, marks=pytest.mark.long)])
def test_hundreds_of_stages(stages):
    found = simulate(Pipeline(schedule="GPipe", devices=stages, micro_batches=stages), 1, 2)
    assert (found.step_s, found.bubble) == ((2 * stages - 1) * 3, exact((stages - 1) / (2 * stages - 1)))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (([1.0], 2.0), "forward_s must be one number of seconds, or one for each stage (2), none negative (got [1.0])"),
        ((1.0, [2.0, -1.0]), "backward_s must be one number of seconds, or one for each stage (2), none negative"),
        ((1.0, 2.0, [1.0] * 2), "link_s must be one number of seconds, or one for each boundary between stages (1)"),
        ((1.0, float("nan")), "backward_s must be one number of seconds"),
    ],
)
def test_times_that_are_refused(times, message):
    with pytest.raises(ValueError) as error:
        simulate(Pipeline(schedule="GPipe", devices=2, micro_batches=2), *times)
    assert str(error.value).startswith(message)


def test_passes_are_told_by_process_and_micro_batch_and_begin_as_early_as_they_can():
    """Two processes and two micro-batches, by hand; the link takes half a second each way."""
    spans = []
    pipeline = Pipeline(schedule="1F1B", devices=2, micro_batches=2)
    simulate(pipeline, forward_s=1, backward_s=2, link_s=0.5, spans=spans)
    assert sorted(spans) == [
        ("process 0", "backward 0", 5.0, 7.0),
        ("process 0", "backward 1", 8.0, 10.0),
        ("process 0", "forward 0", 0.0, 1.0),
        ("process 0", "forward 1", 1.0, 2.0),
        ("process 1", "backward 0", 2.5, 4.5),
        ("process 1", "backward 1", 5.5, 7.5),
        ("process 1", "forward 0", 1.5, 2.5),
        ("process 1", "forward 1", 4.5, 5.5),
    ]
