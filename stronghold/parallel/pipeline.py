"""The public face: a model cut into stages over the processes that torchrun has started."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stronghold.offload import by_first
from stronghold.parallel.partitioning import Balance, choose_stages
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
    balance: Balance = "time",
    schedule: str | None = None,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
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

    ``loss(output, targets)`` is the mean over a micro-batch. ``balance`` says where the row is cut, where a layer is a
    child with parameters and those without any behind it:

    - ``"time"`` for the least time of the slowest stage, and ``"memory"`` for the least bytes (weights and activations)
      of the fullest. The first process measures each layer with ``inputs``, a batch like those that will come; the loss
      counts where there are ``targets`` too.
    - ``"layers"`` for as many layers in each stage, measuring nothing; or ``[26, 23]``, the layers of each.
    - The path of a file of vPipe's, ``{"partition": [26, 23], "recompute_ratio": [1, 1]}``, that the first process can
      read. Ratios of 1 mean ``activations="recompute"`` and ratios of 0 ``"keep"``; others are refused.

    ``schedule`` is "GPipe", "1F1B" or "Interleaved1F1B"; by default 1F1B with one stage on each process, else
    interleaved. ``device``, ``dtype``, ``weights`` and ``settings`` are those of :func:`stronghold.offload`, for each
    process's part.

    The other processes' layers stay in ``module`` as they are: let go of it, or build it on the meta device and pass
    ``weights``. Random numbers that layers draw, for dropout say, are each process's own. Raises ParallelError,
    ValueError and BudgetError before anything has changed, in all processes; and whatever ``stronghold.offload``
    raises.
    """
    return in_stages(
        SequentialRow(module, loss),
        stages=stages,
        micro_batches=micro_batches,
        balance=balance,
        schedule=schedule,
        inputs=inputs,
        targets=targets,
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
    balance: Balance,
    schedule: str | None,
    inputs: Tensor | None,
    device: torch.device,
    targets: Tensor | None = None,
    dtype: torch.dtype | None = None,
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
    processes.agree({"balance": str(balance)})
    sizes, activations = by_first(
        processes,
        lambda: choose_stages(
            row,
            order,
            balance,
            inputs=inputs,
            targets=targets,
            device=processes.device,
            dtype=dtype,
            activations=settings.get("activations"),
        ),
    )
    if activations is not None:
        settings.setdefault("activations", activations)
    return StagedModule(row, sizes, order, processes, dtype=dtype, **settings)
