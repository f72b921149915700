"""Training through a working window: this project's own way."""

from dataclasses import asdict

import torch
from torch import nn

from stronghold.config import TrainSettings
from stronghold.methods import Prepared, decay_groups
from stronghold.offload import offload, report, trace
from stronghold.optim import AdamW
from stronghold.weights import Weights


class Stronghold:
    """Layers in the store, a window of them on the device, AdamW on the host."""

    name = "stronghold"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` offloaded, in place, and its AdamW."""
        offload(
            model,
            device=settings.device,
            dtype=torch.bfloat16 if settings.dtype == "bf16" else None,
            weights=weights,
            **asdict(settings.offload),
        )
        wanted = settings.optimizer
        optimizer = AdamW(
            decay_groups(model, wanted.weight_decay),
            lr=wanted.lr,
            betas=wanted.betas,
            eps=wanted.eps,
            max_grad_norm=wanted.max_grad_norm,
            states=wanted.states,
            update=wanted.update,
            nonfinite=wanted.nonfinite,
        )
        return Prepared(
            model=model,
            optimizer=optimizer,
            report=lambda: report(model),
            device=torch.device(settings.device),
            saves=True,
            trace=lambda: trace(model),
        )
