"""Gives the layers of an offloaded model other places before anything has been trained."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch._C import DisableTorchFunctionSubclass

from stronghold.engine.timing import Stopwatch
from stronghold.planner.step_bytes import spread
from stronghold.settings import kept_layers
from stronghold.unit import Unit, gradient_of
from stronghold.weights import give_values
from stronghold.window import Window

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine


def refused_for(engine: Engine) -> str | None:
    """Returns why the layers must stay where they are, None where they may move."""
    optimizer = engine.own_optimizer
    if optimizer is None:
        return "nothing of ours updates it"
    if any(block.compiled is not None for block in engine.blocks):
        return "its layers are compiled"
    if engine.optimizers.others(optimizer):
        return "several optimizers train it"
    for unit in engine.layers:
        with DisableTorchFunctionSubclass():
            if any(gradient_of(parameter) is not None for parameter in unit.parameters):
                return "it has gradients"
        if unit.is_aliased:
            return f"a tensor over the memory of {unit.name} is held"
        if not unit.may_move:
            return f"parameters of {unit.name} were frozen, or unfrozen"
    return None


def rearrange(engine: Engine, window: int, resident: int, activations: int | str) -> None:
    """Has so many layers stay on the device, others go through a window of slots, and the last ones keep activations.

    The weights, and the masters that they are halves of, stay what they are to the bit, and so do their states. Nothing
    may be under way, :func:`refused_for` must have no reason, and no layer is resident.
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
            optimizer.follow(unit, partial(_keep_on_device, unit))
    except BaseException:
        _put_window(engine, old)
        raise
    _put_window(engine, window)
    kept = kept_layers(activations, len(engine.layers))
    engine.compiling.activations = activations
    for block in engine.blocks:
        block.keep = block.layer >= len(engine.layers) - kept


def _keep_on_device(unit: Unit) -> None:
    unit.keep_on_device()
    with DisableTorchFunctionSubclass():
        for index, (parameter, weight) in enumerate(zip(unit.parameters, unit.weight, strict=True)):
            give_values(parameter, weight)
            unit.attach(index)
    unit.sample()


def _put_window(engine: Engine, size: int) -> None:
    streamed = sum(not unit.resident for unit in engine.layers)
    engine.window = Window(engine.layers, min(size, streamed), engine.device, engine.store, engine.waits)
    engine.gradients.grad_offload.leave_out_resident()
    engine.held.on_device(engine.window, engine.gradients)
    engine.stopwatch = Stopwatch(
        engine.waits, engine.window.traffic, engine.gradients.grad_offload.traffic, engine.store.counters
    )
