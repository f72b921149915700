"""What each layer of a row takes and moves in a stage that is offloaded, found without placing anything."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import nn

from stronghold.distributed.layered_model import LayeredModel, shared_by_ends
from stronghold.engine.budget import BUFFERS
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.formats.kept_in_fp32 import mark_kept_in_fp32
from stronghold.planner.choices import Choice
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import machine_of
from stronghold.planner.machine_share import share_of
from stronghold.planner.offloaded_stages import OffloadedLayer, OffloadedStages
from stronghold.planner.step_costs import Machine
from stronghold.probing import kept_machine


def offloaded_stages(
    layered: LayeredModel,
    window: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    machine: MachineFile | None = None,
    processes: int = 1,
) -> OffloadedStages:
    """Returns what the stages of ``layered`` take with a window of so many layers on ``device``.

    Bytes are those that ``stronghold.offload`` places, by its own arithmetic. Root parameters count as updated on the
    host, which is the least that they take on the device. ``machine`` was measured, and is that of all ``processes``,
    each with its share of the updates' threads. The model may be on the meta device; nothing of it changes. Raises
    ValueError for layers that cannot be offloaded, and for a machine on which their updates were not measured.
    """
    mark_kept_in_fp32(layered.model)  # by its own list, which a part has not
    is_host, shared = device.type == "cpu", {id(parameter) for parameter in shared_by_ends(layered)}
    layers = [_layer(layered, number, dtype, is_host, shared) for number in range(len(layered.layers))]
    rates = None if machine is None else _rates(machine, layered.model, dtype, processes)
    return OffloadedStages(window=window, layers=layers, gradient_slots=BUFFERS.gradient_slots, machine=rates)


def machine_known(machine: MachineFile | str | os.PathLike[str] | None, device: torch.device) -> MachineFile | None:
    """Returns what was measured of a machine: what is given, or its file's, or what is kept of this one, if anything.

    Raises ValueError for a file that is no machine's, and OSError for none.
    """
    if machine is None or isinstance(machine, MachineFile):
        return machine or kept_machine(device)
    return MachineFile.read(machine)


def _layer(
    layered: LayeredModel, number: int, dtype: torch.dtype | None, is_host: bool, shared: Collection[int]
) -> OffloadedLayer:
    alone = nn.Sequential(layered.stage(number, number + 1))
    container = f"0{layered.container and '.'}{layered.container}"
    memory = ModelMemory(alone, layers=[container], dtype=dtype, is_host=is_host)
    found = memory.of(Choice(window=1))
    (own,) = found.layers
    on_host = sum(  # elsewhere the device updates the root's, but for what other processes update as well
        counted.trained_elements
        for counted, (unit, _) in zip(found.root, memory.units.root, strict=True)
        if is_host or id(unit.parameters[0]) in shared
    )
    return OffloadedLayer(
        slot_bytes=own.slot,
        gradient_bytes=own.gradient_slot,
        root_bytes=found.buffers + sum(unit.on_device for unit in found.root),
        elements=own.trained_elements + on_host,
    )


def _rates(machine: MachineFile, model: nn.Module, dtype: torch.dtype | None, processes: int) -> Machine:
    dtypes = {p.dtype for p in model.parameters()} if dtype is None else {dtype}
    rates = machine_of(machine, dtype="bfloat16" if dtypes == {torch.bfloat16} else "float32", states="fp32")
    return share_of(rates, processes, is_host=machine.is_host)
