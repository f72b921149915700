"""FSDP2 with everything that is not computing in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.ordinary import join_alone, measure, recompute_layers, reference_model
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights, fill


class FsdpOffload:
    """PyTorch's fully_shard with its CPUOffloadPolicy, a group for each layer as its documentation has it.

    Parameters, gradients and states are fp32 on the host; a layer's are on the device while it computes, in the compute
    type, and the next one's are fetched meanwhile (FSDP's own prefetch). The optimizer runs on the host.
    """

    name = "fsdp-offload"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` sharded over one process, and its optimizer."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        gpt = reference_model(model, settings, self.name, activations=("recompute", "keep"))
        device, wanted = torch.device(settings.device), settings.optimizer
        join_alone(device)
        fill(gpt, weights)
        if settings.offload.activations == "recompute":
            recompute_layers(gpt)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
        }
        if settings.dtype == "bf16":
            # Gradients summed in fp32 is what torchtitan trains with.
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in gpt.layers:
            fully_shard(layer, **options)
        fully_shard(gpt, **options)
        groups = decay_groups(gpt, wanted.weight_decay)
        return Prepared(
            model=gpt,
            optimizer=torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True),
            report=lambda: measure(settings, gpt.config.parameters),
            device=device,
            max_grad_norm=wanted.max_grad_norm,
        )
