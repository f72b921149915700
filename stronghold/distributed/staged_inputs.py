"""What several processes are planned for with: inputs of a part of the batch, and a model that is cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.distributed.layered_model import LayeredModel
from stronghold.distributed.process_plans import StagedModel
from stronghold.distributed.row_costs import RowCosts
from stronghold.distributed.stage_planner import StagePlanner
from stronghold.engine.planning.model_planner import Limits
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.staged_search import StagedSpace

Inputs = Tensor | Mapping[str, Any] | Sequence[Any]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Returns the tensors among the arguments of a model, of which the first one's first dimension is the batch."""
    values = [inputs] if isinstance(inputs, Tensor) else inputs.values() if isinstance(inputs, Mapping) else inputs
    found = [value for value in values if isinstance(value, Tensor) and value.ndim]
    if not found:
        raise ValueError(
            f"several processes share out the first dimension of a model's inputs (got none among {len(list(values))} "
            "arguments); pass inputs=, tensors whose first dimension is the batch"
        )
    return found


def part_of(inputs: Inputs, replicas: int) -> Inputs:
    """Returns the part of one of so many replicas: of each tensor with the batch in its first dimension."""
    batch = len(tensors_of(inputs)[0])

    def part(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.ndim and len(value) == batch
        return value[: batch // replicas] if is_batched else value

    if isinstance(inputs, Tensor):
        return part(inputs)
    if isinstance(inputs, Mapping):
        return {name: part(value) for name, value in inputs.items()}
    return [part(value) for value in inputs]


def stages_refused(
    model: nn.Module,
    row: LayeredModel | None,
    inputs: Sequence[Tensor],
    *,
    update: str | None,
    resident: int | None,
    cut: int | str | None,
    activations: int | str | None,
    accumulate: int | None,
) -> str:
    """Returns why the model is not planned for in stages, nothing where it is."""
    if row is None and not isinstance(model, nn.Sequential):
        return f"stages are cut out of an nn.Sequential, or the reference GPT (got {type(model).__name__})"
    if row is None and len(inputs) > 1:
        return f"a stage takes one tensor (got {len(inputs)} inputs)"
    if update == "in_backward":
        return "stages are planned for with deferred updates (got update='in_backward')"
    if resident:
        return f"of a stage all layers stay on the device in a plan, or none (got resident={resident})"
    if isinstance(activations, int):
        return f"how many layers of a stage keep their activations is chosen for each (got activations={activations})"
    if (accumulate or 1) > 1:
        return f"the micro-batches of stages are all of a step (got accumulate={accumulate})"
    if isinstance(cut, int):
        return f"micro-batches of a model in stages go through all of them (got micro_batch={cut})"
    return ""


def staged_model(
    row: LayeredModel,
    machine: MachineFile,
    limits: Limits,
    inputs: Sequence[Tensor],
    *,
    dtype: torch.dtype | None,
    processes: int,
    states: Sequence[str],
    kepts: Sequence[bool],
    window: int | None,
    resident: int | None,
    directories: Sequence[str] = (),
) -> StagedModel:
    """Returns who answers for steps of a row of layers in stages, and what may be chosen.

    On the host's memory a window is a second copy of layers, which replicas need, who have them in common. Layers may
    be in ``directories``, if there are any. Raises ValueError for layers that cannot be offloaded or computed.
    """
    batch, layers = len(inputs[0]), len(row.layers)
    costs = RowCosts(row, machine, inputs[0], inputs[1] if len(inputs) > 1 else None, dtype=dtype)
    compute = str(dtype or next(iter(row.layers[0].parameters())).dtype).removeprefix("torch.")
    planner = StagePlanner(
        costs, machine, limits, dtype=compute, batch=batch, processes=processes, directories=directories
    )
    windows = range(1, layers + 1) if window is None else (window,)
    space = StagedSpace(
        layers=layers,
        batch=batch,
        kepts=kepts,
        states=states,
        stores=("ram", "disk") if directories else ("ram",),
        windows=windows,
        may_stay=window is None and resident is None,
        apart=not machine.is_host,
    )
    return StagedModel(planner=planner, space=space)


def loss_of(output: Any) -> Tensor:
    """Returns a loss of an output that has none: the mean square of its numbers."""
    return output if output.ndim == 0 else output.float().pow(2).mean()
