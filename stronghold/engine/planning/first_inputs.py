"""What a model is planned for whose inputs nobody has told of before its first training pass."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stronghold.device import Device
from stronghold.engine.planning.asked import RESERVED, TRAINING_BYTES, limits
from stronghold.engine.planning.auto import all_resident_if_as_fast, dtypes_of, followed, machine_here, space_of
from stronghold.engine.planning.searched import PlannedModel
from stronghold.planned import PlannedSteps
from stronghold.settings import OffloadSettings
from stronghold.unit import all_parameters

BATCHES = 2
"""How many batches' activations must fit, for a later batch may be larger than the first: nobody has said."""
LEFT = 0.5
"""Of the device's memory, what is left to activations, however small the first batch is."""


@dataclass(frozen=True, kw_only=True)
class FirstPlan:
    """Where layers are to be, and what that makes of a step."""

    window: int
    resident: int
    activations: int | str
    steps: PlannedSteps


def plan_first_pass(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    device: Device,
    *,
    layers: str | Sequence[str] | None,
    autocast: torch.dtype | None,
    update: str,
    states: str,
    root: Collection[str],
    held_bytes: int,
    process_bytes: int,
    accumulate: int | None,
) -> FirstPlan:
    """Plans an offloaded model that nobody has made settings for, for its first inputs and the optimizer that it has.

    A step adds up the gradients of so many batches, ``accumulate``, if it is known. It computes under ``autocast`` to
    that type, if any. Root parameters stay where they are, those of the names ``root`` resident. All that the process
    has of the device's memory but for ``held_bytes`` of the model's stays as it is, and so do ``process_bytes`` of the
    host's. Raises ValueError for a model that cannot be planned for, BudgetError where nothing fits.
    """
    plain = _without_values(model)
    dtypes = dtypes_of(plain, None)
    if autocast is not None and autocast not in dtypes:
        dtypes = (*dtypes, autocast)
    machine = machine_here(device, (), dtypes)
    if device.torch_device.type != "cpu":
        torch.accelerator.empty_cache()  # what evaluation has left there is free
    most = replace(limits(machine, plain, None, None), process=process_bytes + TRAINING_BYTES, batches=BATCHES)
    if most.device is not None and (free := device.free_bytes()) is not None:
        most = replace(most, device=min(most.device, int((1 - RESERVED) * (free + held_bytes))))
    if most.device is not None:
        most = replace(most, held=int((1 - LEFT) * most.device))
    # Tensors without values are the CPU's, and so is the autocast that they see.
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        found = PlannedModel(plain, machine, inputs, layers=layers, dtype=None, directories=(), accumulate=accumulate)
        found.memory.place_root(root)
        space = space_of(found, OffloadSettings(resident="auto", activations="auto"))
        space = replace(space, updates=(update,), states=(states,))
        plan = all_resident_if_as_fast(found, found.best(space, most), space, most)
    return FirstPlan(
        **{name: plan.settings[name] for name in ("window", "resident", "activations")},
        steps=PlannedSteps({update: followed(plan)}),
    )


def _without_values(model: nn.Module) -> nn.Module:
    """Returns an ordinary copy of an offloaded model whose parameters are on the meta device.

    It has no hooks: the user's are not to see tensors without values.
    """
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for _, parameter in all_parameters(model):
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(like, requires_grad=parameter.requires_grad)
    plain = copy.deepcopy(model, memo)
    for module in plain.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                hooks.clear()
    return plain
