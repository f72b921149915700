"""``pipeline(model)``: a model cut into stages over the processes that torchrun has started."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.distributed.layered_model import LayeredModel, LayeredSequential, Loss
from stronghold.distributed.partitioning import Balance, choose_stages
from stronghold.distributed.processes import Processes
from stronghold.distributed.staged import StagedModule
from stronghold.errors import ParallelError
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.pipeline_order import Pipeline
from stronghold.unit import from_rank0
from stronghold.weights import Weights


def pipeline(
    module: nn.Module,
    *,
    loss: Loss,
    stages: int,
    micro_batches: int,
    replicas: int = 1,
    balance: Balance = "time",
    schedule: str | None = None,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    machine: MachineFile | str | os.PathLike[str] | None = None,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    **settings: Any,
) -> StagedModule:
    """Cuts an ``nn.Sequential`` into stages, one or several for each process, and offloads this process's.

    All processes build the same ``module`` and call this, under ``torchrun --nproc-per-node N``, where N is
    ``replicas`` times a number that divides ``stages``::

        model = stronghold.pipeline(model, loss=F.cross_entropy, stages=4, micro_batches=8, inputs=x, device="cpu")
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-3)
        for x, y in loader:  # the same batches in every process
            loss = model.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()

    A layer is a child with parameters, and those without any behind it. The other processes' layers stay in ``module``
    as they are: let go of it, or build it on the meta device and pass ``weights``. Random numbers that layers draw, for
    dropout say, each process draws by itself: replicas from seeds of their own, the stages of one from the same seed,
    unless ``torch.manual_seed`` gives each another one behind this.

    Args:
        module: The row of layers, the same in every process.
        loss: ``loss(output, targets)``, the mean over a micro-batch. Where some labels are ignored that is not the mean
            over the batch, and NaN where a micro-batch has none: see :meth:`StagedModule.forward_backward`.
        stages: The parts that the row is cut into.
        micro_batches: How many a replica's part of the batch is passed on as.
        replicas: Each trains the whole model with its part of every batch. Those of a stage that are on one machine
            have its memory in common: weights, gradients and AdamW's states are there once, and each replica updates
            its share. Every machine that has some must have as many of them.
        balance: Where the row is cut. ``"time"`` takes the least time of the slowest stage, and ``"memory"`` the least
            bytes (weights and activations) of the fullest: the first process measures each layer with ``inputs``.
            With ``window=`` a number of layers, that window is what a stage has of its weights on the device, and its
            fetches and updates count beside computing where ``machine`` has their rates.
            ``"layers"`` takes as many layers in each stage, measuring nothing; ``[26, 23]`` are the layers of each. The
            path of a file of vPipe's, ``{"partition": [26, 23], "recompute_ratio": [1, 1]}``, is read by the first
            process, and what is in one may be passed itself, as a plan has it. A ratio is the part of a stage's layers
            that is recomputed in the backward pass, from the stage's end and rounded down to whole layers; the others
            keep what autograd saves. ``activations="host"`` and ``"disk"`` are then of those that are recomputed, and
            ``"keep"`` is refused where there are any.
        schedule: ``"GPipe"``, ``"1F1B"`` or ``"Interleaved1F1B"``; by default 1F1B with one stage on each process, else
            interleaved.
        inputs: A batch like those that will come, to measure with.
        targets: With them the loss counts in what is measured.
        machine: What ``stronghold.probe`` measured of the first process's machine, or its file; by default what is kept
            of it, if anything is. The processes there share its threads, and its messages count in what is planned.
        device: As for :func:`stronghold.offload`, for each process's part; so are ``dtype`` and ``weights``.
        dtype: The compute type. Under ``torch.autocast`` each stage but the last must return the type that it returns
            without it.
        weights: What gives the model its values.
        **settings: The other arguments of :func:`stronghold.offload`.

    Returns:
        This process's part, with ``forward_backward(inputs, targets)``.

    Raises:
        ParallelError: Processes that are too few, or do not agree, before anything has changed, in all of them; as are
            ValueError and BudgetError, and whatever ``offload`` raises.
    """
    processes = Processes(torch.device(device), wanted=stages * replicas, replicas=replicas)
    return in_stages(
        LayeredSequential(module, loss),
        processes,
        stages=stages,
        micro_batches=micro_batches,
        balance=balance,
        schedule=schedule,
        inputs=inputs,
        targets=targets,
        machine=machine,
        dtype=dtype,
        weights=weights,
        **settings,
    )


def in_stages(
    layered: LayeredModel,
    processes: Processes,
    *,
    stages: int,
    micro_batches: int,
    balance: Balance,
    schedule: str | None = None,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    machine: MachineFile | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> StagedModule:
    """Does the same with a row of layers of any kind."""
    each = processes.each
    if stages % each or each == 1 < stages:
        of_one = " of a replica" if each < processes.world_size else ""
        processes.refuse(
            f"the processes{of_one} must divide the stages, and be two or more (got {each} for {stages} stages); start "
            f"torchrun with --nproc-per-node {stages * processes.world_size // each}"
        )
    a_device = stages // each
    order = processes.run_on_all(
        lambda: Pipeline(
            schedule=schedule or ("1F1B" if a_device == 1 else "Interleaved1F1B"),
            devices=each,
            micro_batches=micro_batches,
            stages_per_device=a_device,
        )
    )
    processes.agree({"balance": str(balance)})
    if isinstance(settings.get("activations"), int):
        raise ParallelError(
            "activations must be words for stages, whose rows of layers differ (got "
            f"activations={settings['activations']!r}); pass a recompute_ratio for each of them with balance="
        )
    chosen = from_rank0(
        processes,
        lambda: choose_stages(
            layered,
            order,
            balance,
            inputs=inputs,
            targets=targets,
            device=processes.device,
            dtype=dtype,
            activations=settings.get("activations"),
            window=settings.get("window"),
            machine=machine,
            here=processes.local_world_size,
            replicas=processes.world_size // each,
        ),
    )
    return StagedModule(
        layered,
        chosen.sizes,
        order,
        processes,
        recomputed=chosen.recomputed,
        planned=chosen.planned,
        dtype=dtype,
        **settings,
    )
