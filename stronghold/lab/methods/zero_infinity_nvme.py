"""ZeRO-Infinity with everything on disk: Rajbhandari et al. (2021), by DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from stronghold.lab.methods import Prepared, deepspeed
from stronghold.lab.methods.ordinary import reference_model
from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights

SUB_GROUP = int(1e8)
"""How many elements AdamW goes over at a time. A buffer holds as many: the documentations' billion would be 16 GB."""


class ZeroInfinityNvme:
    """ZeRO 3: masters, gradients and states in files, and of the weights what is beyond a billion elements.

    The files are in the store's directory, without one in the run's folder, and go with the process.
    """

    name = "zero-infinity-nvme"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns DeepSpeed's engine around ``model``. Raises StrongholdError where DeepSpeed or libaio is absent."""
        gpt = reference_model(
            model, settings, self.name, activations=("recompute", "keep"), keeps=("store", "micro_batch")
        )
        directories = settings.offload.directories or [os.path.join(settings.out, "store")]
        if len(directories) > 1:
            raise ValueError(f"{self.name} swaps to one directory (got store={settings.offload.store!r}); pass one")
        deepspeed.begin(settings, self.name, asynchronous_io=True)
        swap = deepspeed.Swap(directories[0])
        return deepspeed.prepare(gpt, settings, weights, zero_settings(settings, gpt.config, swap.path), swap)


def zero_settings(settings: TrainSettings, shape: GPTConfig, directory: str) -> dict[str, Any]:
    """Returns DeepSpeed's settings, by deepspeed.ai/docs/config-json and huggingface.co/docs/transformers/deepspeed."""
    pinned = settings.device != "cpu"
    largest = max(4 * shape.hidden**2, shape.rows * shape.hidden)
    return deepspeed.base_settings(settings) | {
        "zero_optimization": deepspeed.stage_3(shape)
        | {
            "offload_param": {
                "device": "nvme",
                "nvme_path": directory,
                "pin_memory": pinned,
                # Both documentations' values; a buffer must hold the largest parameter, and more in it is not used.
                "buffer_count": 5,
                "buffer_size": largest,
                "max_in_cpu": int(1e9),
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": directory,
                "pin_memory": pinned,
                "buffer_count": 4,  # "Adam optimizer has 4 states"
                # Not pipelined, as in transformers' example. A pipeline reads the next group and writes the last one
                # beside the AdamW of this one: in DeepSpeed 0.19.8 that fails from the second group on with fewer than
                # 12 buffers, 4 for each of the three, and with 12 it was no faster (benchmarks/NOTES.md).
                "pipeline_read": False,
                "pipeline_write": False,
                "fast_init": False,
            },
            "sub_group_size": SUB_GROUP,
        },
        # The values of transformers' documentation. ds_nvme_tune, DeepSpeed's own, finds others for other disks.
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
