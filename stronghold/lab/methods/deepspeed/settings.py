"""What DeepSpeed's settings have in common, whatever is offloaded where.

Sources: [config] deepspeed.ai/docs/config-json, [transformers] huggingface.co/docs/transformers/deepspeed, which
DeepSpeed's own documentation refers to for settings by the size of the model.
"""

from __future__ import annotations

from typing import Any

from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.settings import TrainSettings


def base_settings(settings: TrainSettings) -> dict[str, Any]:
    """Returns what is learned: batch, compute type, AdamW and clipping, as every other method has them.

    DeepSpeed's launcher would bind cores to ranks (--bind_cores_to_rank): one process has them all without it, and
    PyTorch's threads, which are DeepSpeedCPUAdam's too, are as many as every other method's.
    """
    wanted, micro_batch = settings.optimizer, micro_batch_of(settings)
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": settings.batch // micro_batch,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "gradient_clipping": wanted.max_grad_norm or 0.0,
        "optimizer": {
            # With an offloaded optimizer this is DeepSpeedCPUAdam, the one that DeepSpeed has for it [config].
            "type": "AdamW",
            "params": {"lr": wanted.lr, "betas": list(wanted.betas), "eps": wanted.eps},
        },
        "steps_per_print": 1_000_000_000,
    }


def micro_batch_of(settings: TrainSettings) -> int:
    """Returns how many samples go through the model at a time; the gradients of a batch are accumulated.

    Raises ValueError if they do not make up the batch: DeepSpeed's have one size.
    """
    micro_batch = min(settings.offload.micro_batch_samples or settings.batch, settings.batch)
    if settings.batch % micro_batch:
        raise ValueError(
            f"DeepSpeed's micro-batches must make up the batch (got batch={settings.batch} and "
            f"micro_batch={micro_batch}); pass a micro_batch that divides it"
        )
    return micro_batch


def stage_3(shape: GPTConfig) -> dict[str, Any]:
    """Returns the settings of ZeRO 3, but for where things are offloaded."""
    matrix = shape.hidden**2
    return {
        "stage": 3,
        # Copies and reductions in a stream of their own, beside computing [config].
        "overlap_comm": True,
        "contiguous_gradients": True,
        # [transformers], "auto": its values by the width of a layer.
        "reduce_bucket_size": matrix,
        "stage3_prefetch_bucket_size": int(0.9 * matrix),
        "stage3_param_persistence_threshold": 10 * shape.hidden,
        # The defaults of [config] and [transformers]: what is gathered may stay for its next use below a billion
        # elements. With one process that keeps smaller models on the device, which is what a user would get.
        "stage3_max_live_parameters": int(1e9),
        "stage3_max_reuse_distance": int(1e9),
    }
