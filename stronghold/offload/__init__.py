"""Ties an ``nn.Module`` to a window."""

from stronghold.offload import other_optimizers as other_optimizers  # whose hooks see every optimizer's step
from stronghold.offload.compiled import uncompiled
from stronghold.offload.engine import Engine
from stronghold.offload.model_parts import follow, keep_activations
from stronghold.offload.offload import close, engine_of, offload, offload_shared, report, trace, verify
from stronghold.offload.writing import writing

__all__ = [
    "Engine",
    "close",
    "engine_of",
    "follow",
    "keep_activations",
    "offload",
    "offload_shared",
    "report",
    "trace",
    "uncompiled",
    "verify",
    "writing",
]
