"""The schedules of torch.distributed.pipelining, made to do the same under every PyTorch from 2.9 on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import schedules


def schedule_of(
    name: str,
    stages: Sequence[Any],
    micro_batches: int,
    *,
    training: bool = True,
    loss: Callable[..., Any] | None = None,
) -> Any:
    """Returns the library's schedule of this ``name`` for the ``stages`` of this process, gradients not scaled.

    For evaluation it is one that takes any number of micro-batches. Raises ValueError where the library refuses theirs.
    PyTorch 2.9 refuses GPipe fewer micro-batches than stages, and has the interleaved schedule compute, with fewer
    micro-batches than processes, before its inputs are there; neither is so of what this returns.
    """
    cls, options = schedules.get_schedule_class(name), {"loss_fn": loss, "scale_grads": False}
    if issubclass(cls, schedules.PipelineScheduleSingle):
        if not training:
            cls = schedules.ScheduleGPipe  # all forward passes; 1F1B refuses fewer micro-batches than stages
        return _of_one_stage(cls, stages[0], micro_batches, **options)
    schedule = cls([*stages], micro_batches, **options)
    if hasattr(schedule, "pipeline_order_with_comms"):
        return schedule
    runtime = schedules._PipelineScheduleRuntime([*stages], micro_batches, **options)
    runtime.pipeline_order = schedule.pipeline_order
    runtime._prepare_schedule_with_comms(schedule.pipeline_order)
    return runtime


def without_outputs(schedule: Any) -> dict[str, bool]:
    """Returns the options with which a step of ``schedule`` returns no outputs; PyTorch 2.9 has none."""
    return {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}


def _of_one_stage(cls: Callable[..., Any], stage: Any, micro_batches: int, **options: Any) -> Any:
    if cls is not schedules.ScheduleGPipe or micro_batches >= stage.num_stages:
        return cls(stage, micro_batches, **options)
    schedule = cls(stage, stage.num_stages, **options)
    assert schedule._n_microbatches == stage.num_stages
    schedule._n_microbatches = micro_batches  # which alone says how many it runs
    schedule.pipeline_order = schedule._get_pipeline_order()
    return schedule
