"""``replicate(model)``: a whole model in every process that torchrun has started."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stronghold.distributed.facts import facts_of
from stronghold.distributed.processes import Processes
from stronghold.engine import engine_of, offload_shared
from stronghold.settings import OffloadSettings
from stronghold.weights import Weights


def replicate(
    model: nn.Module,
    *,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    **settings: Any,
) -> nn.Module:
    """Offloads ``model`` in each of the processes that torchrun has started, which train it together: data parallelism.

    All processes build the same model and call this, under ``torchrun --nproc-per-node N``; what follows is the
    ordinary loop, in each with batches of its own, of the same size::

        model = stronghold.replicate(model, window=4)
        optimizer = stronghold.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
        for batch in loader:  # with a DistributedSampler
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    A step's gradients are the mean of all replicas'. Those of a layer are reduce-scattered as they leave the device;
    each replica brings its share down and updates that share of the layer, in host memory that all of them have in
    common: weights, gradients and AdamW's states are there once, however many replicas there are, and a fetch reads
    what all of them have written. So a parameter is the same tensor in each, which may be read; to write it is an
    error, as are another optimizer's step and clipping gradients in place: pass ``max_grad_norm``. What is on the
    device, the root and resident layers, each has for itself: it may not write it either, and the gradients there are
    its own until ``step()``, which makes them the mean. On several machines, each with as many processes, every machine
    has one such set: the shares of a gradient are added up over the machines (all-reduced) before they come down, and
    each machine updates all weights, to the same bits. With bf16 compute the mean is taken in bf16. Values and buffers
    are the first one's; what buffers become (BatchNorm's statistics) is each one's own, and a checkpoint has the first
    one's. Random numbers of torch are each replica's own: its generators are seeded anew. All replicas weigh the same
    in the mean, as under DistributedDataParallel, so that batches should have as many samples in each; where they have
    not, the first replica warns, once, with the numbers.

    All replicas must have gradients for the same parameters, and the same settings of the optimizer when they step:
    where one leaves out a layer that another computes, or has another learning rate, all end with an error.
    Under ``in_backward`` some layers have been updated with nonsense by then: load a checkpoint.

    Args:
        model: The same in every process.
        device: ``"cuda"`` is the GPU of the process's local rank.
        dtype: As for :func:`stronghold.offload`.
        weights: As for :func:`stronghold.offload`.
        **settings: Its other arguments, with ``host_memory`` for each process and a store's directory for all of a
            machine; of several machines each has one of its own below it.

    Returns:
        The same module, changed in place.

    Raises:
        ParallelError: Machines that have not as many processes, or processes that do not agree, before anything has
            changed; and what ``offload`` raises.
    """
    processes = Processes(torch.device(device), wanted=2, replicas=None)
    return replicated(model, processes, dtype=dtype, weights=weights, **settings)


def replicated(
    model: nn.Module,
    processes: Processes,
    *,
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    **settings: Any,
) -> nn.Module:
    """Does the same with ``processes`` that have joined."""
    processes.agree(facts_of(model, dtype, settings))
    directories = OffloadSettings(store=settings.get("store", "ram")).directories
    if directories and processes.local_world_size < processes.world_size:  # they may be the same ones on all machines
        settings["store"] = processes.folders(directories)
    processes.run_on_all(
        lambda: offload_shared(
            model, processes.replicas, device=processes.device, dtype=dtype, weights=weights, **settings
        )
    )
    engine = engine_of(model)
    assert engine is not None
    copies = model.parameters() if processes.replica else ()
    engine.join(processes, shared={}, copies=copies, model=engine.kind, passes=1, here=processes.local_world_size)
    processes.draw_apart()
    return model
