"""Schedules do the same whichever PyTorch is installed: here each is one that does as the oldest does."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as library
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from stronghold.distributed.schedules import schedule_of, without_outputs
from tests.planner.torch_schedules import IdleStage, parts_of


class OldGPipe(library.ScheduleGPipe):
    def __init__(self, stage, n_microbatches, **options):
        if n_microbatches < stage.num_stages:
            raise ValueError(f"{n_microbatches} must be at least {stage.num_stages}")
        super().__init__(stage, n_microbatches, **options)


class OldInterleaved(library.PipelineScheduleMulti):
    """It computes by the order alone, whatever has come."""

    def __init__(self, stages, n_microbatches, **options):
        super().__init__(stages, n_microbatches, **options)
        self.pipeline_order = ScheduleInterleaved1F1B(stages, n_microbatches, **options).pipeline_order


def idle(stages, devices, device):
    return [IdleStage(stage, stages, devices) for stage in range(device, stages, devices)]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("name", "training"), [("GPipe", True), ("GPipe", False), ("1F1B", False)])
def test_all_forward_passes_take_any_number_of_micro_batches(monkeypatch, name, training, micro_batches):
    monkeypatch.setattr(library, "ScheduleGPipe", OldGPipe)
    monkeypatch.setattr(library, "get_schedule_class", lambda name: {"GPipe": OldGPipe}.get(name, library.Schedule1F1B))
    (stage,) = idle(4, 4, 2)
    schedule = schedule_of(name, [stage], micro_batches, training=training)
    schedule._initialize_stage = lambda *args, **kwargs: None  # which would look for neighbours
    schedule._maybe_get_loss = lambda stage, micro_batch: None
    schedule._step_microbatches()
    assert stage.done == [f"2{way}{number}" for way in "FB" for number in range(micro_batches)]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_an_interleaved_stage_computes_when_its_input_has_come(monkeypatch, micro_batches):
    monkeypatch.setattr(library, "get_schedule_class", lambda name: OldInterleaved)
    for device in range(4):
        schedule = schedule_of("Interleaved1F1B", idle(8, 4, device), micro_batches)
        computed, received = [], set()
        for action in schedule.pipeline_order_with_comms[device]:
            stage, kind, micro_batch = parts_of(action)
            if kind.startswith("RECV_"):
                received.add((kind[-1], stage, micro_batch))
            elif kind in "FB":
                ends = {"F": 0, "B": 7}[kind] == stage
                assert ends or (kind, stage, micro_batch) in received, (device, action)
                computed.append(str(action))
        in_order = [str(action) for action in schedule.pipeline_order[device] if action is not None]
        assert computed == in_order and len(computed) == 2 * 2 * micro_batches


class OldStep:
    def step(self, *args, target=None, losses=None, **kwargs):
        return kwargs


class NewStep:
    def step(self, *args, target=None, losses=None, return_outputs=True, **kwargs):
        return return_outputs


@pytest.mark.parametrize(("schedule", "found"), [(OldStep(), {}), (NewStep(), False)])
def test_a_step_is_asked_for_no_outputs_where_it_can_be(schedule, found):
    """What it does not know it would give to the layers."""
    assert schedule.step(**without_outputs(schedule)) == found
