"""torchao's optimizer offload: weights on the device, masters, gradients and states on the host."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.errors import StrongholdError
from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.ordinary import measure, recompute_layers, reference_model
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights, fill


class TorchaoOffload:
    """torchao's CPUOffloadOptimizer around PyTorch's AdamW, with recomputation.

    fp32 only: its masters have the dtype of the weights, so that bf16 would train without fp32 masters.
    """

    name = "torchao-offload"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` on the device, and its optimizer. Raises StrongholdError where there is no torchao."""
        gpt = reference_model(model, settings, self.name)
        device, wanted = torch.device(settings.device), settings.optimizer
        if device.type != "cuda":
            raise ValueError(f"{self.name} runs on CUDA alone (got device={settings.device!r}); pass device='cuda'")
        if settings.dtype != "fp32":
            raise ValueError(
                f"{self.name} has no fp32 masters of weights in another type (got dtype={settings.dtype!r}); pass fp32"
            )
        try:
            offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        except ImportError as error:
            raise StrongholdError(f"{self.name} needs torchao ({error}); install the extra 'baselines'") from error
        fill(gpt, weights)
        gpt.to(device)
        recompute_layers(gpt)
        optimizer = offload(
            decay_groups(gpt, wanted.weight_decay),
            torch.optim.AdamW,
            lr=wanted.lr,
            betas=wanted.betas,
            eps=wanted.eps,
            fused=True,
        )
        return ClippedOnHost(
            model=gpt,
            optimizer=optimizer,
            report=lambda: measure(settings, gpt.config.parameters),
            device=device,
            max_grad_norm=wanted.max_grad_norm,
            packages=("torchao",),
        )


@dataclass(frozen=True, kw_only=True)
class ClippedOnHost(Prepared):
    """Clips the gradients where the optimizer reads them.

    torchao copies each to the host as it arises, before their norm is known: clipping those on the device would reach
    only the parameters that it updates there.
    """

    def step(self) -> None:
        """Clips, updates, and frees the gradients."""
        optimizer: Any = self.optimizer
        if self.max_grad_norm is not None:
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm, error_if_nonfinite=True)
            factor = min(1.0, self.max_grad_norm / (norm.item() + 1e-6))  # as clip_grad_norm_ has it
            optimizer.stream.synchronize()  # for the copies to the host
            if factor < 1.0:
                for on_host in optimizer.param_d2h_map.values():
                    on_host.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
