"""What a checkpoint keeps of each unit, and under which names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor, nn

from stronghold.engine import Engine, engine_of
from stronghold.engine.adamw import AdamW
from stronghold.errors import OffloadedModelError
from stronghold.native import Blocks
from stronghold.optim.states import ParameterState, moments_of
from stronghold.unit import ProcessGroup, Unit, all_parameters, index_of, unit_of

Names = dict[Unit, list[str]]
"""The names of a unit's parameters, by index."""
Format = Literal["safetensors", "dcp"]
"""How a checkpoint is written: as our own files, or by ``torch.distributed.checkpoint``."""


def check_format(format: str) -> None:
    """Raises ValueError for one that is not known."""
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(map(repr, get_args(Format)))} (got {format!r})")


def engine_for(model: nn.Module, optimizer: AdamW) -> Engine:
    """Returns the engine of an offloaded model. Raises OffloadedModelError where ``optimizer`` is not over it."""
    engine = engine_of(model)
    if engine is None:
        raise OffloadedModelError(
            f"a checkpoint is of an offloaded model (got a {type(model).__name__} that is not); call "
            "stronghold.offload(model) first"
        )
    engine.check_open()
    groups = optimizer.param_groups if isinstance(optimizer, AdamW) else []
    first = next((unit_of(parameter) for group in groups for parameter in group["params"]), None)
    if first is None or first.owner is not engine:
        raise OffloadedModelError(
            f"a checkpoint needs the model's own optimizer (got a {type(optimizer).__module__}."
            f"{type(optimizer).__name__}{' over another model' if isinstance(optimizer, AdamW) else ''}); pass the "
            "stronghold.AdamW over this model"
        )
    return engine


def names_of(model: nn.Module) -> Names:
    """Returns the names of all parameters, as ``model.named_parameters()`` of the whole model in one process has them.

    Raises OffloadedModelError for one that was added after ``offload``, and where one was taken away.
    """
    indices: dict[Unit, dict[int, str]] = {}
    for name, parameter in all_parameters(model):
        unit = unit_of(parameter)
        if unit is None:
            raise OffloadedModelError(
                f"every parameter of an offloaded model must have been there at offload() (got {name}, which a "
                "checkpoint would leave out); add modules and parameters first, then offload"
            )
        whole = unit.owner.whole_names.get(id(parameter), name)
        indices.setdefault(unit, {})[parameter.__dict__["_index"]] = whole
    for engine in {unit.owner for unit in indices}:
        if any(len(indices.get(unit, ())) < len(unit.parameters) for unit in engine.units):
            engine.refuse_changes()
    return {unit: [named[index] for index in range(len(named))] for unit, named in indices.items()}


def group_names(optimizer: AdamW, names: Names) -> list[list[str]]:
    """Returns the names of the parameters of every group of ``optimizer``."""
    return [
        [names[unit][index_of(p)] for p in group["params"] if (unit := unit_of(p)) is not None]
        for group in optimizer.param_groups
    ]


def all_groups(processes: ProcessGroup, optimizer: AdamW, names: Names) -> list[list[str]]:
    """Returns the names of the parameters of every group, of all processes that train the model.

    Raises ValueError where they have not got as many groups, or a parameter that several have in another group.
    """
    everyone = processes.all_gather_object(group_names(optimizer, names))
    counts = [len(groups) for groups in everyone]
    if len(set(counts)) > 1:
        raise ValueError(f"the optimizers of all processes must have as many groups (got {counts}); give each the same")
    joined = [list(dict.fromkeys(name for group in groups for name in group)) for groups in zip(*everyone, strict=True)]
    places = [(name, number) for number, group in enumerate(joined) for name in group]
    for name, numbers in Counter(name for name, _ in places).items():
        if numbers > 1:
            got = [number for other, number in places if other == name]
            raise ValueError(
                f"a parameter that several processes have must be in the same group in each (got {name} in groups "
                f"{' and '.join(map(str, got))}); give it to one of them everywhere"
            )
    return joined


def holds(engine: Engine, directory: Path) -> bool:
    """Whether a checkpoint in ``directory`` is one in the place of the model's own store.

    Raises ValueError for a store of a model in several processes, each of which has its own part in its own.
    """
    everyone = engine.processes.all_gather_object(engine.store.holds(directory))
    if len(everyone) > 1 and any(everyone):
        raise ValueError(
            f"a checkpoint of a model in {len(everyone)} processes has a directory of its own (got {str(directory)!r}, "
            "one of their stores); pass another"
        )
    return everyone[0]


def tensors_of(unit: Unit, names: list[str], states: Mapping[Tensor, ParameterState]) -> dict[str, Tensor]:
    """Returns what is kept of a unit, by the names in its file; the tensors are the unit's own memory.

    A weight has its parameter's name; ``/remainder``, ``/exp_avg`` and ``/exp_avg_sq``, or Muon's ``/momentum_buffer``,
    follow it where there is one, and ``/exponents`` these where their moment is in eight bits.
    """
    found: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(zip(names, unit.parameters, strict=True)):
        found[name] = unit.weight[index]
        if index in unit.masters.remainders:
            found[f"{name}/remainder"] = unit.masters.remainders[index]
        state = states.get(parameter) or ParameterState()
        for key in moments_of(state):
            moment = state[key]
            if isinstance(moment, Blocks):
                found[f"{name}/{key}"], found[f"{name}/{key}/exponents"] = moment.codes, moment.exponents
            else:
                found[f"{name}/{key}"] = moment
    return found


def step_of(parameter: Tensor, states: Mapping[Tensor, ParameterState]) -> float | None:
    """Returns how many steps the optimizer has taken with a parameter, None where it has no moments."""
    state = states.get(parameter)
    return float(state["step"]) if state else None


def persistent_buffers(model: nn.Module) -> set[str]:
    """Returns the names of the buffers that ``state_dict()`` has, all that they have."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
