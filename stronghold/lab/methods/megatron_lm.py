"""The whole model on the device, as Megatron-LM has it on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.ordinary import measure, recompute_layers, reference_model
from stronghold.lab.settings import OptimizerSettings, TrainSettings
from stronghold.weights import Weights, fill

OptimizerAndPackages = tuple[torch.optim.Optimizer, tuple[str, ...]]


class MegatronLM:
    """Weights, gradients and states on the device, full recomputation, the fused AdamW.

    With bf16 the weights and gradients are bf16, and fp32 masters beside them are what is updated
    (Megatron-LM's Float16OptimizerWithFloat16Params).
    """

    name = "megatron-lm"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` on the device, and its optimizer."""
        gpt = reference_model(model, settings, self.name, activations=("recompute", "keep"))
        device = torch.device(settings.device)
        fill(gpt, weights)
        gpt.to(device)
        if settings.offload.activations == "recompute":
            recompute_layers(gpt)
        groups = decay_groups(gpt, settings.optimizer.weight_decay)
        masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        if settings.dtype == "bf16":
            for group in groups:
                pairs = [(weight, nn.Parameter(weight.detach().clone())) for weight in group["params"]]
                group["params"] = [master for _, master in pairs]
                masters += pairs
            gpt.to(torch.bfloat16)
        optimizer, package = self.adamw(groups, settings.optimizer, device)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def held_bytes() -> int:
            weights_and_masters = {id(p): p for p in [*gpt.parameters(), *trained]}
            states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, Tensor)]
            gradients = 2 if settings.dtype == "bf16" else 4
            held = sum(tensor.nbytes for tensor in [*weights_and_masters.values(), *states])
            return held + gradients * gpt.config.parameters

        return self.prepared(
            model=gpt,
            optimizer=optimizer,
            report=lambda: measure(settings, gpt.config.parameters, held_device_bytes=held_bytes()),
            device=device,
            max_grad_norm=settings.optimizer.max_grad_norm,
            packages=package,
            masters=tuple(masters),
        )

    def adamw(self, groups: list[dict], wanted: OptimizerSettings, device: torch.device) -> OptimizerAndPackages:
        """Returns what updates ``groups``, and the packages that it is from."""
        return fused_adamw(groups, wanted, device)

    def prepared(self, **fields: Any) -> WithMasters:
        """Returns what trains."""
        return WithMasters(**fields)


@dataclass(frozen=True, kw_only=True)
class WithMasters(Prepared):
    """Updates ``masters``, pairs of a bf16 weight and its fp32 master, where there are any; otherwise the weights."""

    masters: tuple[tuple[nn.Parameter, nn.Parameter], ...]

    def step(self) -> None:
        """Clips, updates, and frees the gradients."""
        if not self.masters:
            super().step()
            return
        for weight, master in self.masters:
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.clip([master for _, master in self.masters])
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([weight for weight, _ in self.masters], [master for _, master in self.masters])


def fused_adamw(groups: list[dict], wanted: OptimizerSettings, device: torch.device) -> OptimizerAndPackages:
    """Returns the AdamW that Megatron-LM would take, and the package that it is from.

    That is NVIDIA Apex's where it is installed (PyPI's package of that name is another thing), else PyTorch's.
    """
    options = {"lr": wanted.lr, "betas": wanted.betas, "eps": wanted.eps}
    if device.type == "cuda":
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            pass
        else:
            return FusedAdam(groups, adam_w_mode=True, **options), ("apex",)
    return torch.optim.AdamW(groups, fused=True, **options), ()  # type: ignore[arg-type]
