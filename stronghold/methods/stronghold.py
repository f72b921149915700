"""Training through a working window: this project's own way."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from stronghold.config import TrainSettings
from stronghold.methods import Prepared, decay_groups
from stronghold.methods.stages import Staged, cut, report_of
from stronghold.offload import offload, report, trace
from stronghold.optim import AdamW
from stronghold.weights import Weights


class Stronghold:
    """Layers in the store, a window of them on the device, AdamW on the host."""

    name = "stronghold"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` offloaded, in place, or this process's stages of it, and its AdamW."""
        offloading: dict[str, Any] = {
            "dtype": torch.bfloat16 if settings.dtype == "bf16" else None,
            "weights": weights,
            **asdict(settings.offload),
        }
        if settings.parallel.stages > 1:
            staged, processes = cut(model, settings, **offloading)
            count = sum(p.numel() for p in model.parameters())
            return Staged(
                model=staged,
                optimizer=_optimizer(staged, settings),
                report=lambda: report_of(staged, processes, count),
                device=processes.device,
                trace=lambda: trace(staged),
                processes=processes,
            )
        offload(model, device=settings.device, **offloading)
        return Prepared(
            model=model,
            optimizer=_optimizer(model, settings),
            report=lambda: report(model),
            device=torch.device(settings.device),
            saves=True,
            trace=lambda: trace(model),
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
