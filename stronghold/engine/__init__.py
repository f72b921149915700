"""Ties an ``nn.Module`` to a window."""

from stronghold.engine import loss_scaling as loss_scaling  # makes GradScaler's copies to the host block
from stronghold.engine import other_optimizers as other_optimizers  # whose hooks see every optimizer's step
from stronghold.engine.compiled import uncompiled
from stronghold.engine.engine import Engine
from stronghold.engine.model_parts import follow, keep_activations
from stronghold.engine.offload import close, engine_of, offload, offload_shared, trace, verify
from stronghold.engine.reporting import report
from stronghold.engine.writing import writing

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
