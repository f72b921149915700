"""A model in stages as the training loop sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stronghold.distributed import Processes, StagedModule, in_stages
from stronghold.engine import report
from stronghold.lab.methods import Prepared
from stronghold.lab.models.gpt import GPT
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.lab.records.stages_report import StagesReport
from stronghold.lab.settings import TrainSettings, micro_batches_of
from stronghold.unit import sum_over


@dataclass(frozen=True, kw_only=True)
class Staged(Prepared):
    """Every process's own stages; all of them call ``loss``, ``backward`` and ``step`` together."""

    processes: Processes

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean loss of ``batch``; where gradients are on, this computes them too."""
        assert isinstance(self.model, StagedModule)
        compute = self.model.forward_backward if torch.is_grad_enabled() else self.model.evaluate
        return compute(batch, batch)

    def backward(self, loss: Tensor) -> None:
        """Does nothing: micro-batches take their backward passes between the forward passes of others."""

    def agreed(self, stop: bool) -> bool:
        return bool(sum_over(self.processes, float(stop)))


def stages_of(model: torch.nn.Module, settings: TrainSettings, processes: Processes, **offloading: Any) -> StagedModule:
    """Returns this process's stages of a reference GPT. Raises ParallelError for any other model."""
    wanted = settings.parallel
    if not isinstance(model, GPT):
        processes.refuse(
            f"stages are cut out of the reference GPT here (got {type(model).__name__}); train it in one process, or "
            "write it as an nn.Sequential for stronghold.pipeline"
        )
    shape = settings.batch, settings.sequence
    ids = torch.randint(model.config.vocabulary, shape, generator=torch.Generator().manual_seed(0))  # to measure with
    return in_stages(
        LayeredGPT(model),
        processes,
        stages=wanted.stages,
        micro_batches=_micro_batches(settings, processes),
        balance=wanted.balance,
        schedule=wanted.schedule,
        inputs=ids,
        targets=ids,
        **offloading,
    )


def report_of(model: torch.nn.Module, processes: Processes, parameters: int) -> StagesReport:
    """Returns what all processes take."""
    replicas, reports = processes.world_size // processes.each, tuple(processes.all_gather_object(report(model)))
    return StagesReport(parameters=parameters, replicas=replicas, reports=reports)


def _micro_batches(settings: TrainSettings, processes: Processes) -> int:
    wanted, batch = settings.parallel, settings.batch // settings.parallel.replicas
    count = micro_batches_of(settings.flat())
    assert count is not None
    if batch % count:
        processes.refuse(
            f"the micro-batches must divide the batch{' of a replica' if wanted.replicas > 1 else ''} (got "
            f"micro_batches={count}, batch={batch}); pass a batch of a multiple of {count * wanted.replicas}, or other "
            "micro-batches"
        )
    return count
