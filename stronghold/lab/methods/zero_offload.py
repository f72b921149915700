"""ZeRO-Offload: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training (2021), by DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch import nn

from stronghold.lab.methods import Prepared, deepspeed
from stronghold.lab.methods.ordinary import reference_model
from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights


class ZeroOffload:
    """ZeRO 2: weights on the device, fp32 masters, gradients and states on the host, DeepSpeed's AdamW there."""

    name = "zero-offload"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns DeepSpeed's engine around ``model``. Raises StrongholdError where there is no DeepSpeed."""
        gpt = reference_model(model, settings, self.name, activations=("recompute", "keep"), keeps=("micro_batch",))
        deepspeed.begin(settings, self.name)
        return deepspeed.prepare(gpt, settings, weights, zero_settings(settings, gpt.config))


def zero_settings(settings: TrainSettings, shape: GPTConfig) -> dict[str, Any]:
    """Returns DeepSpeed's settings, those for speed by deepspeed.ai/tutorials/zero-offload and .../docs/config-json."""
    return deepspeed.base_settings(settings) | {
        "zero_optimization": {
            "stage": 2,
            # "could boost throughput at the cost of extra memory overhead" (config-json); there is nothing to pin for
            # where the device is the CPU.
            "offload_optimizer": {"device": "cpu", "pin_memory": settings.device != "cpu"},
            # Both from the tutorial: gradients leave while the backward pass goes on, from one buffer.
            "overlap_comm": True,
            "contiguous_gradients": True,
            # "parallelizes gradient copying to CPU memory among ranks" (config-json): of no effect with one process.
            "round_robin_gradients": True,
            # The defaults, cut to the size of the model, for buffers are allocated in full.
            "reduce_bucket_size": min(int(5e8), shape.parameters),
            "allgather_bucket_size": min(int(5e8), shape.parameters),
        }
    }
