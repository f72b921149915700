"""The order of passes against literals and against the schedules of torch.distributed.pipelining themselves."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stronghold.planner.pipeline_order import SCHEDULES, Pass, Pipeline
from tests.planner.torch_schedules import executed_order, held_order, schedule_of


def printed(name, devices, micro_batches, stages_per_device=1):
    """The passes of each device, printed."""
    pipeline = Pipeline(
        schedule=name, devices=devices, micro_batches=micro_batches, stages_per_device=stages_per_device
    )
    return [" ".join(map(str, pipeline.order(device))) for device in range(devices)]


def test_gpipe_runs_all_forward_passes_first():
    assert printed("GPipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_takes_turns_after_as_many_forward_passes_as_there_are_stages_to_come():
    assert printed("1F1B", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_goes_round_the_devices_twice():
    assert printed("Interleaved1F1B", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_a_pass_prints_as_torchs_does():
    assert [str(Pass(2, False, 0)), str(Pass(13, True, 7))] == ["2F0", "13B7"]


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.integers(1, 12))
def test_the_order_is_what_torch_executes(name, devices, micro_batches):
    assume(name == "GPipe" or micro_batches >= devices)
    assert printed(name, devices, micro_batches) == executed_order(name, devices, micro_batches)


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.integers(1, 12))
def test_the_order_is_what_torch_holds(name, devices, micro_batches):
    assume(name == "GPipe" or micro_batches >= devices)
    held = held_order(name, devices, micro_batches)
    if name == "1F1B":  # whose last stage torch 2.13 prints with forward passes 1 to m, and runs with 0 to m - 1
        assert printed(name, devices, micro_batches)[:-1] == held[:-1]
    else:
        assert printed(name, devices, micro_batches) == held


@given(st.integers(1, 5), st.integers(1, 16), st.integers(1, 4))
def test_the_interleaved_order_is_what_torch_holds_and_so_is_what_is_refused(devices, micro_batches, stages_per_device):
    shape = devices, micro_batches, stages_per_device
    try:
        held = held_order("Interleaved1F1B", *shape)
    except ValueError:
        with pytest.raises(ValueError, match="micro-batches that divide into"):
            printed("Interleaved1F1B", *shape)
    else:
        assert printed("Interleaved1F1B", *shape) == held


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_each_micro_batch_passes_each_stage_once_forward_and_then_once_back(name, devices, rounds, stages_per_device):
    pipeline = Pipeline(
        schedule=name,
        devices=devices,
        micro_batches=rounds * devices,
        stages_per_device=stages_per_device if name == "Interleaved1F1B" else 1,
    )
    for device in range(devices):
        order = list(pipeline.order(device))
        each = [(stage, i) for stage in pipeline.stages_of(device) for i in range(pipeline.micro_batches)]
        assert sorted(order) == sorted(Pass(stage, backward, i) for stage, i in each for backward in (False, True))
        assert all(order.index(Pass(stage, False, i)) < order.index(Pass(stage, True, i)) for stage, i in each)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "stages_per_device", "held"),
    [
        ("GPipe", 4, 8, 1, [8, 8, 8, 8]),
        ("1F1B", 4, 8, 1, [4, 3, 2, 1]),
        ("1F1B", 4, 4, 1, [4, 3, 2, 1]),
        # Device 0 begins 4 + 2·3 forward passes and one more: stage 0 has its 4 of each of two rounds before the first
        # round's gradients are back. Device 3 begins 4 and one more.
        ("Interleaved1F1B", 4, 8, 2, [8, 8, 7, 5, 4, 4, 3, 1]),
    ],
)
def test_how_many_micro_batches_a_stage_holds(name, devices, micro_batches, stages_per_device, held):
    pipeline = Pipeline(
        schedule=name, devices=devices, micro_batches=micro_batches, stages_per_device=stages_per_device
    )
    assert pipeline.held() == held


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zero"}, "schedule must be one of GPipe, 1F1B, Interleaved1F1B (got 'zero')"),
        ({"devices": 0}, "devices must be a whole number of at least 1 (got 0); pass one"),
        ({"micro_batches": True}, "micro_batches must be a whole number of at least 1 (got True); pass one"),
        ({"stages_per_device": 1.0}, "stages_per_device must be a whole number of at least 1 (got 1.0); pass one"),
        (
            {"stages_per_device": 2},
            "1F1B has one stage on each device (got stages_per_device=2); pass 1, or schedule='Interleaved1F1B'",
        ),
        (
            {"micro_batches": 3},
            "1F1B needs at least as many micro-batches as stages (got micro_batches=3, stages=4); "
            "pass micro_batches=4, or schedule='GPipe'",
        ),
        (
            {"schedule": "Interleaved1F1B", "micro_batches": 9, "stages_per_device": 2},
            "Interleaved1F1B needs micro-batches that divide into 2 rounds, one for each whole multiple of the devices "
            "(got micro_batches=9, devices=4); pass micro_batches=8",
        ),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError) as error:
        Pipeline(**{"schedule": "1F1B", "devices": 4, "micro_batches": 8, **settings})
    assert str(error.value) == message


def test_torch_refuses_fewer_micro_batches_than_stages_under_1f1b_too():
    with pytest.raises(ValueError, match="greater than or equal to the number of stages"):
        schedule_of("1F1B", 4, 3)
