"""How long each operation of a step takes by itself: its bytes by the machine's rates, its elements by nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stronghold.planner.disk_play import CHUNK_BYTES
from stronghold.planner.host_work import issued_s
from stronghold.planner.program import LAUNCHES, Kind, Program
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings, UnitWork


def work_s_of(
    program: Program,
    layers: Sequence[LayerWork],
    root: Sequence[RootWork],
    machine: Machine,
    settings: StepSettings,
) -> list[float]:
    """Returns the seconds that each operation takes in its lane: bytes by rates, elements by nanoseconds."""
    work_s = [0.0] * len(program.operations)
    units: list[UnitWork] = [*layers, *root]
    resident, issued = frozenset(settings.resident), set(LAUNCHES.values())
    for (kind, number), uses in program.uses.items():
        if kind in issued:
            taken_s = issued_s(kind, layers[number], machine, settings, resident=number in resident)
        elif (taken := _SECONDS.get(kind)) is not None:
            taken_s = taken(units[number], machine, settings)
        else:
            continue
        for here in uses:
            work_s[here] = taken_s
    return work_s


_SECONDS: dict[Kind, Callable[[Any, Machine, StepSettings], float]] = {
    Kind.FORWARD: lambda unit, *_: unit.forward_s,
    Kind.BEFORE_GRADIENTS: lambda layer, *_: layer.first_gradient_s,
    Kind.BACKWARD: lambda unit, *_: unit.backward_s - unit.first_gradient_s,
    Kind.FETCH: lambda layer, machine, _: machine.copy_s + layer.weight_bytes / machine.h2d_bytes_per_s,
    Kind.GRADIENTS: lambda unit, machine, _: machine.down_s(unit.gradient_bytes),
    Kind.ADD: lambda unit, machine, _: unit.elements * machine.host_add_ns * 1e-9,
    Kind.ADD_ON_DEVICE: lambda unit, *_: unit.add_s,
    Kind.INPUTS_DOWN: lambda layer, machine, settings: _inputs_s(layer, machine.d2h_bytes_per_s, machine, settings),
    Kind.INPUTS_UP: lambda layer, machine, settings: _inputs_s(layer, machine.h2d_bytes_per_s, machine, settings),
    Kind.MOMENTUM: lambda unit, machine, _: machine.parts_s(unit).first_s,
    Kind.ITERATE: lambda unit, machine, _: machine.parts_s(unit).iterations_s,
    Kind.UPDATE: lambda unit, machine, _: _update_s(unit, machine),
    Kind.STEP: lambda unit, machine, _: machine.parts_s(unit).last_s,
    Kind.UPDATE_ON_DEVICE: lambda layer, machine, _: machine.on_device_s(layer),
    Kind.UPLOAD: lambda root, machine, _: machine.up_s(root.weight_bytes),
}


def _inputs_s(layer: LayerWork, bytes_per_s: float, machine: Machine, settings: StepSettings) -> float:
    return settings.pieces * machine.copy_s + layer.input_bytes / bytes_per_s


def _update_s(unit: UnitWork, machine: Machine) -> float:
    """Returns what the host takes for each part that passes through the ring, or beside a unit's iterations."""
    first_s, _, others_s, last_s = machine.parts_s(unit)
    chunks = chunks_of(unit)
    return (first_s + others_s + last_s) / chunks if chunks else others_s


def chunks_of(unit: UnitWork) -> int:
    """Returns in how many parts an update passes through the ring, 0 where it does not."""
    return -(-unit.ring_bytes // CHUNK_BYTES)


def disk_s_of(
    program: Program, units: Sequence[UnitWork], machine: Machine
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the seconds of the disk that operations read before themselves, and write behind, by their number."""
    read, write = machine.disk_read_bytes_per_s, machine.disk_write_bytes_per_s
    reads_s, writes_s = {}, {}
    for here in program.on_disk:
        one = program.operations[here]
        unit = units[one.number]
        if one.kind is Kind.READ:
            reads_s[here] = unit.weight_bytes / read
        elif one.kind is Kind.INPUTS_WRITE and isinstance(unit, LayerWork):
            writes_s[here] = unit.input_bytes / write
        elif one.kind is Kind.INPUTS_READ and isinstance(unit, LayerWork):
            reads_s[here] = unit.input_bytes / read
        elif one.kind is Kind.UPDATE:
            chunk_bytes = unit.ring_bytes / chunks_of(unit)
            reads_s[here], writes_s[here] = chunk_bytes / read, chunk_bytes / write
    return reads_s, writes_s
