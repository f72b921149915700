"""A whole model in each of several processes, as the training loop sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stronghold.distributed import Processes, replicated
from stronghold.lab.methods import Prepared
from stronghold.lab.settings import TrainSettings
from stronghold.unit import sum_over


@dataclass(frozen=True, kw_only=True)
class Replicated(Prepared):
    """One replica; all of them call ``loss``, ``backward`` and ``step`` together, with the same batches."""

    processes: Processes

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean loss of ``batch``; where gradients are on, this computes them too, of this replica's part.

        A batch that does not divide is evaluated by each replica whole.
        """
        if len(batch) % self.processes.world_size == 0:
            batch = batch.chunk(self.processes.world_size)[self.processes.replica]
        loss = super().loss(batch)
        if torch.is_grad_enabled():
            loss.backward()
        return self.processes.mean(loss.detach())

    def backward(self, loss: Tensor) -> None:
        """Does nothing: ``loss`` is of all replicas, and of its own part each has the gradients."""

    def agreed(self, stop: bool) -> bool:
        return bool(sum_over(self.processes, float(stop)))


def replicas_of(
    model: torch.nn.Module, settings: TrainSettings, processes: Processes, **offloading: Any
) -> torch.nn.Module:
    """Returns ``model`` offloaded by all processes. Raises ParallelError where they are not as many as replicas."""
    if processes.each > 1:
        processes.refuse(
            f"there must be as many processes as replicas, or stages in each (got {processes.world_size} processes for "
            f"{settings.parallel.replicas} replicas of one stage); start torchrun with --nproc-per-node "
            f"{settings.parallel.replicas}, or pass stages"
        )
    return replicated(model, processes, **offloading)
