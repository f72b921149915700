"""What ``"auto"`` comes to where the inputs of a step are known: the planner's answer for the machine at hand."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Device
from stronghold.engine.planning.asked import RESERVED, kepts, limits, micro_batches, sizes
from stronghold.engine.planning.given import check_plan
from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.searched import PlannedModel
from stronghold.errors import BudgetError
from stronghold.planned import MUON as BY_MUON
from stronghold.planned import PlannedStep, PlannedSteps
from stronghold.planner.choices import Space
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.search import ENOUGH
from stronghold.planner.step_bytes import MUON
from stronghold.planner.training_plan import TrainingPlan
from stronghold.probing import DTYPES, directory_there, disk_of, fp32_products, glance, kept_machine
from stronghold.settings import UPDATES, OffloadSettings, PlannedSettings

_LOG = logging.getLogger("stronghold")
_LEFT_OPEN = {**vars(OffloadSettings()), **dict.fromkeys(("resident", "micro_batch", "activations"), "auto")}
"""What settings are where the user has not set them beside a plan."""
COMPILED = "layers take as long as eager ones, where compiled ones are to take less"
"""What a plan with ``compile`` assumes."""
_glances: dict[tuple[object, ...], MachineFile] = {}
"""What was seen of a machine that was never probed, in this process."""


def settled(
    model: nn.Module,
    settings: OffloadSettings,
    device: Device,
    *,
    inputs: Tensor | Mapping[str, Any] | Sequence[Any] | None,
    plan: TrainingPlan | str | os.PathLike[str] | None,
    layers: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    in_memory: nn.Module,
) -> tuple[OffloadSettings, PlannedSteps]:
    """Returns the settings with what was ``"auto"`` by the ``plan``, or by one for ``inputs``, and what it says.

    That is by the ``update`` of AdamW, of which ``inputs`` leave both open unless the settings know it. ``in_memory``
    is what the model stands for, whose values are the process's until they are in the store.
    """
    if plan is None:
        assert inputs is not None
        found, steps, inputs_host_bytes = _planned(
            model, settings, device, inputs, layers=layers, dtype=dtype, in_memory=in_memory
        )
        said = {"micro_batch": None, **found.settings, "store": settings.store, "host_memory": settings.host_memory}
        return PlannedSettings(**{**vars(settings), **said}, kept_inputs_bytes=inputs_host_bytes), steps
    if inputs is not None:
        raise ValueError("a plan is for inputs of its own (got plan= and inputs=); leave out one of them")
    found = plan if isinstance(plan, TrainingPlan) else TrainingPlan.read(plan)
    check_plan(found, model, device.torch_device, dtype)
    if found.processes > 1:
        call = "pipeline(…, **plan.parallel" if found.parallel["stages"] > 1 else "replicate(model"
        raise ValueError(
            f"offload follows a plan of one process (got one of {found.processes}); call "
            f"stronghold.{call}, **plan.settings) in each of {found.processes}, which torchrun starts, or train by it: "
            "stronghold train --plan"
        )
    said = {**vars(found.offload_settings()), "compile": settings.compile}  # what a plan leaves to the user
    said["accumulate"] = found.accumulate
    for name, value in vars(settings).items():
        if value not in (_LEFT_OPEN[name], said[name], found.optimizer.get(name)):
            raise ValueError(
                f"a plan holds for its own settings (got {name}={value!r} beside one with {said[name]!r}); leave out "
                f"{name}, or plan with it"
            )
    if settings.compile:
        found = replace(found, assumed=[*found.assumed, COMPILED])
    return replace(settings, **said), PlannedSteps(
        {(BY_MUON if found.updated_by == "Muon" else "") + found.optimizer["update"]: found.planned()}
    )


def _planned(
    model: nn.Module,
    settings: OffloadSettings,
    device: Device,
    inputs: Tensor | Mapping[str, Any] | Sequence[Any],
    *,
    layers: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    in_memory: nn.Module,
) -> tuple[TrainingPlan, PlannedSteps, int]:
    """Plans what ``settings`` leave to ``"auto"``, for AdamW as they know it.

    Otherwise that has moments in fp32, and updates behind the backward pass or, where the gradients do not all fit, in
    it. Third is what layers' inputs will take of the host's memory. Nothing is changed. A model that fits is left
    resident where nothing else is faster by more than a little. Raises ValueError for a model that cannot be planned
    for, BudgetError where nothing fits.
    """
    if device.is_host and settings.device_memory is not None:
        raise ValueError(
            f"device_memory is planned with where a device has memory of its own (got {settings.device_memory} with "
            f"inputs= on {device.name}); pass host_memory= there, or leave out inputs="
        )
    directories = [os.path.realpath(path) for path in settings.directories]
    machine = machine_here(device, directories, dtypes_of(model, dtype))
    found = PlannedModel(
        model,
        machine,
        inputs,
        layers=layers,
        dtype=dtype,
        directories=directories,
        activations=settings.activations,
        accumulate=settings.accumulate,
    )
    if settings.compile:
        found.assume(COMPILED)
    most = limits(machine, in_memory, settings.device_memory, None)
    if most.device is not None and settings.device_memory is None and (free := device.free_bytes()) is not None:
        most = replace(most, device=min(most.device, int((1 - RESERVED) * free)))
    if (host := settings.host_memory) is not None:
        assert isinstance(host, int)
        most = replace(most, host=min(most.host, most.process + host))
    most = replace(most, fills_ram=False, in_ram=host, update=settings.update, states=settings.states)
    is_known = settings.accumulates or settings.update is not None
    plan, space = _least_asked(found, space_of(found, settings), most, is_known=is_known)
    plan = all_resident_if_as_fast(found, plan, space, most)
    step, update = followed(plan), plan.optimizer["update"]
    inputs_host_bytes = found.inputs_host_bytes(plan.settings.get("micro_batch"))
    chosen = replace(
        space,
        windows=(plan.settings["window"],),
        residents=(plan.settings["resident"],),
        kepts=kepts(plan.settings["activations"], space.layers),
        micro_batches=(plan.settings.get("micro_batch"),),
    )
    updates = ("deferred",) if settings.accumulates else UPDATES
    steps = PlannedSteps({update: step, **_by_muon(found, chosen, most, updates)})
    if update == "deferred" and "in_backward" in updates:
        steps["in_backward"] = found.best(replace(chosen, updates=("in_backward",)), most).planned()
    return plan, steps, inputs_host_bytes


def followed(plan: TrainingPlan) -> PlannedStep:
    """Returns the step of a plan that is followed, and logs it."""
    step = plan.planned()
    _LOG.info("%s on %s: %s; %s", plan.model, plan.machine, step.chosen, step.reason)
    return step


def space_of(found: PlannedModel, settings: OffloadSettings) -> Space:
    """Returns what ``settings`` leave open, for AdamW as they know it: else as it is by default."""
    activations = None if settings.activations == "auto" else settings.activations
    window, resident = (None if one == "auto" else one for one in (settings.window, settings.resident))
    assert not isinstance(window, str) and not isinstance(resident, str)
    count = len(found.memory.units.layers)
    return Space(
        layers=count,
        **sizes(found.memory, window, resident),
        kepts=kepts(activations, count, may_keep=found.may_keep, resident=resident),
        micro_batches=micro_batches(settings.micro_batch, found),
        updates=(settings.update or "deferred",),
        states=(settings.states or "fp32",),
        stores=("disk",) if settings.directories else ("ram",),
    )


def all_resident_if_as_fast(found: PlannedModel, plan: TrainingPlan, space: Space, most: Limits) -> TrainingPlan:
    """Returns the plan that leaves all layers on the device, where it fits and is longer by no more than a little."""
    if plan.settings["resident"] < space.layers in space.residents:
        with contextlib.suppress(BudgetError):  # then it does not fit
            all_resident = found.best(replace(space, residents=(space.layers,)), most)
            if all_resident.step_s.likely <= (1 + ENOUGH) * plan.step_s.likely:
                return all_resident
    return plan


def _by_muon(found: PlannedModel, chosen: Space, most: Limits, updates: Sequence[str]) -> dict[str, PlannedStep]:
    """Returns the steps with Muon in AdamW's place under the settings that were chosen for that, where they fit."""
    steps, of_muon = dict[str, PlannedStep](), found.for_muon()
    for update in updates:
        with contextlib.suppress(BudgetError):  # then Muon itself refuses it, with the numbers
            space = replace(chosen, states=(MUON,), updates=(update,))
            steps[BY_MUON + update] = of_muon.best(space, most).planned()
    return steps


def _least_asked(found: PlannedModel, space: Space, most: Limits, *, is_known: bool) -> tuple[TrainingPlan, Space]:
    """Returns the best plan, and the space that it is of: under ``in_backward`` where all gradients do not fit.

    That is not where it ``is_known`` when layers are updated. Raises BudgetError where neither fits, with what the one
    needs that needs less.
    """
    try:
        return found.best(space, most), space
    except BudgetError as deferred:
        if is_known:
            raise
        in_backward = replace(space, updates=("in_backward",))
        try:
            return found.best(in_backward, most), in_backward
        except BudgetError as error:
            if all(size < deferred.needed.get(place, 0) for place, size in error.needed.items()):
                raise
        raise


def dtypes_of(model: nn.Module, dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """Returns those of DTYPES in which the model computes."""
    used = {parameter.dtype for parameter in model.parameters()} if dtype is None else {dtype}
    return tuple(one for one in DTYPES if one in used) or DTYPES


def machine_here(device: Device, directories: Sequence[str], dtypes: tuple[torch.dtype, ...]) -> MachineFile:
    """Returns what ``stronghold.probe`` has kept of this machine, or a glance at it, once in a process.

    It has the disks that ``directories`` will be on.
    """
    kept = kept_machine(device.torch_device)
    if kept is not None and kept.is_host == device.is_host and (found := _with_disks(kept, directories)) is not None:
        return found
    there = tuple(dict.fromkeys(map(directory_there, directories)))
    key = device.name, device.is_host, there, dtypes, fp32_products(device.torch_device)
    if key not in _glances:
        _glances[key] = glance(device, there, dtypes)
    found = _with_disks(_glances[key], directories)
    assert found is not None
    return found


def _with_disks(machine: MachineFile, directories: Sequence[str]) -> MachineFile | None:
    """Returns the machine with the disk of each directory by its name, None where one was not measured."""
    disks = dict(machine.disks)
    for path in directories:
        if (disk := disk_of(machine, path)) is None:
            return None
        disks[path] = disk
    return replace(machine, disks=disks)
