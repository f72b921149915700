"""Writes that the parameters themselves do not see, and that the user tells of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.unit import BoundParameter, OffloadedParameter, Unit, unit_of

Units = dict[Unit, list[int]]
"""Parameters of offloaded models, by their number in their unit."""


@contextmanager
def writing(target: nn.Module | Iterable[Tensor]) -> Iterator[None]:
    """Tells that the block writes parameters by a way that torch does not see, such as a pointer in an extension.

    ``target`` is an offloaded model or some of its parameters; others are ignored. Before the block the updates under
    way are complete, and after it every copy of the parameters on the device is fetched again. In bf16 a written weight
    becomes its own fp32 master, in blocks of 64 elements. What torch itself does (operators, ``p.data``, views, numpy)
    and the step of every ``torch.optim.Optimizer`` need no such block.

    Raises OffloadedModelError where replicas train the parameters.
    """
    units = units_of(target.parameters() if isinstance(target, nn.Module) else target)
    begin(units)
    try:
        yield
    finally:
        end(units)


def begin(units: Units) -> None:
    """Completes the updates of ``units`` and has their stores and masters expect writes."""
    for unit in units:
        unit.check_own()
        unit.wait_updated()
    _expect_writes(units)


def end(units: Units) -> None:
    """Has the units fetched again: a computation amid the writing may have asked already.

    A backward pass to a forward pass from before is refused.
    """
    _expect_writes(units)
    for unit in units:
        unit.supersede()


def _expect_writes(units: Units) -> None:
    for unit, indices in units.items():
        for index in indices:
            unit.mark_aliased(index, unseen=True)


def units_of(parameters: Iterable[Any]) -> Units:
    """Returns those of ``parameters`` that belong to offloaded models."""
    units: Units = {}
    for parameter in parameters:
        if isinstance(parameter, BoundParameter) and torch._C._current_graph_task_id() == -1:
            _ = parameter.grad  # ends a backward pass that has failed, with the layer in its slot
        if isinstance(parameter, OffloadedParameter) and (unit := unit_of(parameter)) is not None:
            units.setdefault(unit, []).append(parameter.__dict__["_index"])
    return units
