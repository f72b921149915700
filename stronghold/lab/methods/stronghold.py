"""Training through a working window: this project's own way."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from stronghold.engine import offload, report, trace
from stronghold.engine.adamw import AdamW
from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.parallel import Replicated, Staged, processes_of, replicas_of, report_of, stages_of
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights


class Stronghold:
    """Layers in the store, a window of them on the device, AdamW on the host."""

    name = "stronghold"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` offloaded, in place, or what this process has of it, and its AdamW."""
        offloading: dict[str, Any] = {
            "dtype": torch.bfloat16 if settings.dtype == "bf16" else None,
            "weights": weights,
            **asdict(settings.offload),
            "update": settings.optimizer.update,
            "states": settings.optimizer.states,
        }
        if not settings.parallel.alone:
            return _with_others(model, settings, offloading)
        offload(model, device=settings.device, **offloading)
        return Prepared(
            model=model,
            optimizer=_optimizer(model, settings),
            report=lambda: report(model),
            device=torch.device(settings.device),
            saves=True,
            trace=lambda: trace(model),
        )


def _with_others(model: nn.Module, settings: TrainSettings, offloading: dict[str, Any]) -> Prepared:
    """Returns what this process trains of ``model``, in stages or whole."""
    processes, count = processes_of(settings), sum(p.numel() for p in model.parameters())
    in_stages = settings.parallel.stages > 1
    part = (stages_of if in_stages else replicas_of)(model, settings, processes, **offloading)
    return (Staged if in_stages else Replicated)(
        model=part,
        optimizer=_optimizer(part, settings),
        report=lambda: report_of(part, processes, count),
        device=processes.device,
        saves=not in_stages and processes.rank == 0,  # there the model is whole
        trace=lambda: trace(part),
        processes=processes,
    )


def _optimizer(model: nn.Module, settings: TrainSettings) -> AdamW:
    wanted = settings.optimizer
    return AdamW(
        decay_groups(model, wanted.weight_decay),
        lr=wanted.lr,
        betas=wanted.betas,
        eps=wanted.eps,
        max_grad_norm=wanted.max_grad_norm,
        states=wanted.states,
        update=wanted.update,
        nonfinite=wanted.nonfinite,
    )
