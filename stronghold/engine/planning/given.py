"""What a plan is asked for with: a model, a machine, and the inputs of a step, as people have them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.formats.model_config import build, build_from_config
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.training_plan import TrainingPlan
from stronghold.probing import facts_of, kept_machine
from stronghold.unit import all_parameters, count_of, is_packed


def model_given(model: nn.Module | str | os.PathLike[str] | Any) -> nn.Module:
    """Returns the module itself, or one on the meta device of a path or a configuration. Raises ValueError."""
    if isinstance(model, nn.Module):
        return model
    try:
        if not isinstance(model, (str, os.PathLike)):
            return build_from_config(model).train()
        path = Path(model)
        return build(path / "config.json" if path.is_dir() else path).train()
    except Exception as error:  # transformers raises all kinds for what it cannot read
        cause = f"{type(error).__name__}, {' '.join(str(error).split())}"
        raise ValueError(
            f"model must be a module, a configuration of transformers, or its config.json (got {model!r}: "
            f"{cause}); build the module under torch.device('meta') and pass that"
        ) from error


def machine_given(machine: MachineFile | str | os.PathLike[str] | None) -> MachineFile:
    """Returns the machine, from its file, or what was kept of this one. Raises ValueError, or OSError for no file."""
    if isinstance(machine, MachineFile):
        return machine
    if machine is not None:
        return MachineFile.read(machine)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    if (kept := kept_machine(device)) is None:
        raise ValueError(
            f"a plan needs a machine that was measured (got none, and nothing is kept of {device.type}); call "
            "stronghold.probe() once, or pass machine=, a file that it wrote"
        )
    return kept


def check_plan(plan: TrainingPlan, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raises ValueError where ``plan`` is of another model, machine or compute type than ``dtype``, or the model's."""
    parameters = sum(count_of(p) for _, p in all_parameters(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if parameters != plan.parameters:
        raise ValueError(
            f"a plan is of one model (got the plan of {plan.model}, {plan.parameters:,} parameters, for a "
            f"{type(model).__name__} of {parameters:,}); plan for this one: stronghold plan -o plan.json"
        )
    if trained != plan.trained_parameters:
        raise ValueError(
            f"a plan is for the parameters that are trained (got the plan of {plan.model}, {plan.trained_parameters:,} "
            f"of them, for a {type(model).__name__} that trains {trained:,}); plan for these: stronghold plan --lora "
            "of adapters, or stronghold.plan(model)"
        )
    here = facts_of(device).device_name
    if here != plan.machine:
        raise ValueError(
            f"a plan is of one machine (got the plan for {plan.machine} on {here}); plan for this one: stronghold plan "
            "-o plan.json"
        )
    own = {p.dtype for p in model.parameters() if p.is_floating_point() and not is_packed(p)}
    computes = sorted(str(one).removeprefix("torch.") for one in (own if dtype is None else {dtype}))
    if computes and plan.dtype not in computes:
        raise ValueError(
            f"a plan is of one type (got one in {plan.dtype} for a {type(model).__name__} in {' and '.join(computes)}"
            f"); pass dtype=torch.{plan.dtype}, or plan in the other: stronghold plan --dtype"
        )


def token_inputs(model: nn.Module, batch: int, sequence: int | None) -> dict[str, Tensor]:
    names = inspect.signature(model.forward).parameters
    if sequence is None or "input_ids" not in names:
        raise ValueError(
            f"{type(model).__name__} must be given inputs to be planned for (got sequence={sequence} for arguments "
            f"{list(names)}); pass sequence= for a model of input_ids, or inputs=, tensors such as its forward() takes"
        )
    ids = torch.empty((batch, sequence), dtype=torch.int64, device="meta")
    return {name: ids for name in ("input_ids", "labels") if name in names}
