"""Where a batch's time goes, by stage: of two processes whose layers wait a known time, planned beside measured."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.device import Device
from stronghold.distributed.stage_clock import StageClock, planned_stages
from stronghold.planner.partition import Partition, StagePlan
from stronghold.planner.pipeline_order import Pipeline
from stronghold.step_times import PlannedStage
from tests.distributed.launched import launch
from tests.distributed.waiting import Waiting

FORWARD_MS, BACKWARD_MS, MICRO_BATCHES = 20, 40, 4
BATCHES = 5
"""Other work on the machine makes a stage compute for longer and wait for less; it seldom does so in each of them."""


def timed(balance: str) -> list[object]:
    """Returns the stages' times before a batch, after each with its own seconds, and the report's, of one process."""
    torch.manual_seed(0)
    layers = [Waiting(FORWARD_MS, BACKWARD_MS) for _ in range(4)]
    inputs = torch.randn(8, 4)
    model = stronghold.pipeline(
        nn.Sequential(*layers),
        loss=F.mse_loss,
        stages=2,
        micro_batches=MICRO_BATCHES,
        balance=[3, 1] if balance == "given" else balance,
        inputs=inputs,
        device="cpu",
        activations="keep",
        window=1,
    )
    before = model.stage_times()
    times = []
    for _ in range(BATCHES):
        begin_s = time.perf_counter()
        model.forward_backward(inputs, inputs)
        batch_s = time.perf_counter() - begin_s
        model.evaluate(inputs, inputs)  # which is no step
        times.append((model.stage_times(), batch_s))
    return [before, times, stronghold.report(model).stages]


@pytest.mark.parametrize(("balance", "sizes"), [("given", [3, 1]), ("time", [2, 2])])
def test_a_stage_computes_for_its_layers_and_waits_for_the_others(tmp_path, balance, sizes):
    pass_s = (FORWARD_MS + BACKWARD_MS) / 1000
    for number, (before, times, reported) in enumerate(
        launch("tests.distributed.test_stage_clock", "timed", 2, tmp_path, balance)
    ):
        ((one,), _) = times[-1]
        assert before == () and reported == (one,)
        assert (one.stage, one.layers) == (number, sizes[number])
        computing_s = MICRO_BATCHES * sizes[number] * pass_s
        for (timed_stage,), batch_s in times:  # with the waits below, no wait is said to be computing
            assert computing_s <= timed_stage.computing_s <= batch_s - timed_stage.waiting_s
        if balance == "given" and number == 1:  # two thirds of the other's time, at the least
            assert max(one.waiting_s for (one,), _ in times) > MICRO_BATCHES * 2 * pass_s * 0.8
        assert one.sent_bytes == 8 * 4 * 4  # activations one way, their gradients the other
        assert (one.planned is None) == (balance == "given")
        if one.planned is not None:
            assert computing_s <= one.planned.computing_s < 10 * computing_s  # as slow as the machine was meanwhile
            assert one.planned.waiting_s > pass_s / 2
            assert one.planned.peak_bytes > 0


class Clock(Device):
    """Stamps that a test sets."""

    now_s = 0.0

    def stamp(self) -> float:
        return self.now_s

    def seconds(self, begin, end) -> float:
        return end - begin


Clock.__abstractmethods__ = frozenset()


def test_stages_of_one_process_share_what_it_waits_for():
    device = Clock.__new__(Clock)
    clock = StageClock(device)
    assert clock.last([1, 2], [0, 1], (), 0) == ()
    with clock.step():
        for stage, seconds in ((0, 2.0), (1, 3.0), (0, 4.0)):
            device.now_s += 0.5
            with clock.computing(stage):
                device.now_s += seconds
        device.now_s += 0.25
    with clock.computing(0):  # an evaluation
        device.now_s += 100
    planned = PlannedStage(computing_s=1, waiting_s=2, peak_bytes=3)
    first, second = clock.last([5, 6], [0, 1], [planned, planned], 7)
    assert (first.stage, first.layers, first.computing_s, first.waiting_s) == (0, 5, 6.0, 1.75)
    assert (second.stage, second.layers, second.computing_s, second.waiting_s) == (1, 6, 3.0, 1.75)
    assert (first.sent_bytes, first.planned) == (7, planned)


def test_a_stage_is_planned_to_wait_for_the_rest_of_a_simulated_step():
    """1F1B over two stages, of 3 and 1.5 s for each of two micro-batches."""
    found = Partition(
        stages=tuple(
            StagePlan(
                first=0, layers=1, recomputed=0, forward_s=seconds, backward_s=2 * seconds, memory_bytes=int(seconds)
            )
            for seconds in (1.0, 0.5)
        ),
        ideal_s=0,
    )
    planned = planned_stages(found, Pipeline(schedule="1F1B", devices=2, micro_batches=2), 0.0)
    # forward 0-1 and 1-2; stage 1 computes at 1-2.5, its gradient goes back at 2.5-4.5; 2.5-4, 4.5-6.5
    assert [(one.computing_s, one.waiting_s, one.peak_bytes) for one in planned] == [(6, 0.5, 1), (3, 3.5, 0)]
    planned = planned_stages(found, Pipeline(schedule="1F1B", devices=2, micro_batches=2), 1.0)
    # what stage 1 is sent arrives at 2 and 3; 2-3.5, 3.5-5; its gradients arrive at 4.5 and 6; 4.5-6.5, 6.5-8.5
    assert [(one.computing_s, one.waiting_s) for one in planned] == [(6, 2.5), (3, 5.5)]
