"""A backward pass computes with the weights of its forward pass, or is refused."""

from __future__ import annotations

import torch

from stronghold.engine.packing import Run
from stronghold.engine.saved import stale_error
from stronghold.unit import ConsumedGradient, Unit, consumed_error, gradient_of
from stronghold.window import Gradients


def is_stale(unit: Unit, run: Run) -> bool:
    """Whether the weights of ``unit`` are others than those that ``run`` has computed with."""
    changed = unit.generation != run.generation or unit.versions_now() != unit.versions
    return changed or unit.was_written_unseen()


def check_same(unit: Unit, run: Run, gradients: Gradients) -> None:
    """Raises OffloadedModelError where the weights of ``unit`` are others than those that ``run`` has computed with.

    Called when the backward pass asks for them.
    """
    if is_stale(unit, run):
        if gradients.has_updated(run.layer):
            raise gradients.too_late(unit)
        if any(isinstance(gradient_of(parameter), ConsumedGradient) for parameter in unit.parameters):
            raise consumed_error()
        raise stale_error(unit.name)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        unit.computed_with.runs.discard(run)  # the loss is often held across the step, and this run with it
