"""The public face: a model cut into stages over the processes that torchrun has started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.parallel.partitioning import choose_sizes
from stronghold.parallel.processes import Processes
from stronghold.parallel.row import Loss, Row, SequentialRow
from stronghold.parallel.staged import StagedModule
from stronghold.plan.pipeline import Pipeline
from stronghold.weights import Weights


def pipeline(
    module: nn.Module,
    *,
    loss: Loss,
    stages: int,
    micro_batches: int,
    balance: str | Sequence[int] = "time",
    schedule: str | None = None,
    inputs: Tensor | None = None,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    **settings: Any,
) -> StagedModule:
    """Cuts an ``nn.Sequential`` into stages, one or several for each process, and offloads this process's.

    All processes build the same ``module`` and call this, under ``torchrun --nproc-per-node N``, where N divides
    ``stages``::

        model = stronghold.pipeline(model, loss=F.cross_entropy, stages=4, micro_batches=8, inputs=x, device="cpu")
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-3)
        for x, y in loader:  # the same batches in every process
            loss = model.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()

    ``loss(output, targets)`` is the mean over a micro-batch. ``balance`` says where the row is cut: ``"time"`` for the
    least time of the slowest stage and ``"memory"`` for the least bytes of the fullest, both by measuring each layer
    with ``inputs``, a batch like those that will come; or the number of layers of each stage, where a layer is a child
    with parameters and those without any behind it. ``schedule`` is "GPipe", "1F1B" or "Interleaved1F1B"; by default
    1F1B with one stage on each process, else interleaved. ``device``, ``dtype``, ``weights`` and ``settings`` are those
    of :func:`stronghold.offload`, for each process's part.

    Random numbers that layers draw, for dropout say, are each process's own. Raises ParallelError, ValueError and
    BudgetError before anything has changed, in all processes; and whatever ``stronghold.offload`` raises.
    """
    return in_stages(
        SequentialRow(module, loss),
        stages=stages,
        micro_batches=micro_batches,
        balance=balance,
        schedule=schedule,
        inputs=inputs,
        device=torch.device(device),
        dtype=dtype,
        weights=weights,
        **settings,
    )


def in_stages(
    row: Row,
    *,
    stages: int,
    micro_batches: int,
    balance: str | Sequence[int],
    schedule: str | None,
    inputs: Tensor | None,
    device: torch.device,
    **settings: Any,
) -> StagedModule:
    """Does the same with a row of layers of any kind."""
    processes = Processes(device, wanted=stages)
    if stages % processes.count or processes.count == 1 < stages:
        processes.refuse(
            f"the processes must divide the stages, and be two or more (got {processes.count} for {stages} stages); "
            f"start torchrun with --nproc-per-node {stages}"
        )
    a_device = stages // processes.count
    order = processes.together(
        lambda: Pipeline(
            schedule=schedule or ("1F1B" if a_device == 1 else "Interleaved1F1B"),
            devices=processes.count,
            micro_batches=micro_batches,
            stages_per_device=a_device,
        )
    )
    sizes = processes.together(lambda: choose_sizes(row, order, balance))
    return StagedModule(row, sizes, order, processes, **settings)
