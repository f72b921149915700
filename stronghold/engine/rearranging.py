"""Gives the layers of an offloaded model other places before anything has been trained."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch._C import DisableTorchFunctionSubclass

from stronghold.planned import PlannedSteps
from stronghold.planner.step_bytes import spread
from stronghold.settings import kept_layers
from stronghold.unit import Unit, gradient_of, is_packed, keep_on_device, may_move
from stronghold.weights import give_values

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine


class NoRoomError(Exception):
    """Layers could not all move: it says which did."""


def refused_for(engine: Engine) -> str | None:
    """Returns why the layers must stay where they are, None where they may move."""
    optimizer = engine.own_optimizer
    if optimizer is None:
        return "nothing of ours updates it"
    if any(block.compiled is not None for block in engine.blocks):
        return "its layers are compiled"
    if engine.optimizers.others(optimizer):
        return "several optimizers train it"
    if any(map(is_packed, (parameter for unit in engine.units for parameter in unit.parameters))):
        return "its weights are quantised"
    if any(unit.computed_with.runs for unit in engine.layers):
        return "a graph of an earlier pass is held"
    for unit in engine.layers:
        with DisableTorchFunctionSubclass():
            if any(gradient_of(parameter) is not None for parameter in unit.parameters):
                return "it has gradients"
        if unit.is_aliased:
            return f"a tensor over the memory of {unit.name} is held"
        if not may_move(unit):
            return f"parameters of {unit.name} were frozen, or unfrozen"
    return None


def rearrange(engine: Engine, window: int, resident: int, activations: int | str, planned: PlannedSteps) -> None:
    """Has so many layers stay on the device, others go through a window of slots, and the last ones keep activations.

    Weights, masters and states stay what they are to the bit. Nothing may be under way, no layer may be resident, and
    :func:`refused_for` must have no reason. ``planned`` is what was planned of it. Raises NoRoomError where the device
    turns out to have none: layers that have moved stay there, and the others have a window as large as fits.
    """
    optimizer = engine.own_optimizer
    assert optimizer is not None
    old = engine.window.size
    engine.close_backward()
    for unit in engine.layers:
        engine.take_writes(unit)
        unit.wait_on_host()
    engine.window.empty()
    moved = [engine.layers[number] for number in sorted(spread(len(engine.layers), resident))]
    try:
        for unit in moved:
            optimizer.move_with(unit, partial(_move, unit))
        _open_window(engine, window, planned)
    except (torch.OutOfMemoryError, MemoryError) as error:
        _open_what_fits(engine, old)
        count = sum(unit.resident for unit in engine.layers)
        raise NoRoomError(
            f"the device has no room for it ({error}); it goes on with {count} resident layers and a window of "
            f"{engine.window.size}"
        ) from error
    except BaseException:  # such as Ctrl-C
        _open_what_fits(engine, old)
        raise
    engine.compiling.activations = activations
    keep_last(engine, kept_layers(activations, len(engine.layers)))


def keep_last(engine: Engine, kept: int) -> None:
    """Has so many layers, the last ones, keep their activations in the next forward pass."""
    for block in engine.blocks:
        block.keep = block.layer >= len(engine.layers) - kept


def _move(unit: Unit) -> None:
    keep_on_device(unit)
    with DisableTorchFunctionSubclass():
        for index, (parameter, weight) in enumerate(zip(unit.parameters, unit.weight, strict=True)):
            give_values(parameter, weight)
            unit.attach(index)
    unit.sample()


def _open_window(engine: Engine, window: int, planned: PlannedSteps) -> None:
    engine.gradients.grad_offload.drop_resident()
    engine.open_window(min(window, sum(not unit.resident for unit in engine.layers)), planned)


def _open_what_fits(engine: Engine, window: int) -> None:
    try:
        _open_window(engine, window, engine.planned)
    except (torch.OutOfMemoryError, MemoryError):
        if window < 2:
            raise
        _open_what_fits(engine, window // 2)
