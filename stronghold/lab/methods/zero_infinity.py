"""ZeRO-Infinity with everything in host memory: Rajbhandari et al. (2021), by DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch import nn

from stronghold.lab.methods import Prepared, deepspeed
from stronghold.lab.methods.ordinary import reference_model
from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights


class ZeroInfinity:
    """ZeRO 3: weights, masters, gradients and states on the host, what computes on the device."""

    name = "zero-infinity"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns DeepSpeed's engine around ``model``. Raises StrongholdError where there is no DeepSpeed."""
        gpt = reference_model(model, settings, self.name, activations=("recompute", "keep"), keeps=("micro_batch",))
        deepspeed.begin(settings, self.name)
        return deepspeed.prepare(gpt, settings, weights, zero_settings(settings, gpt.config))


def zero_settings(settings: TrainSettings, shape: GPTConfig) -> dict[str, Any]:
    """Returns DeepSpeed's settings, those for speed by deepspeed.ai/docs/config-json."""
    pinned = settings.device != "cpu"  # there is nothing to pin for where the device is the CPU
    return deepspeed.base_settings(settings) | {
        "zero_optimization": deepspeed.stage_3(shape)
        | {
            "offload_param": {"device": "cpu", "pin_memory": pinned},
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
            # The default: AdamW goes over the parameters a billion at a time, here over all at once.
            "sub_group_size": int(1e9),
        }
    }
