"""Ties an ``nn.Module`` to a window."""

from stronghold.offload import other_optimizers as other_optimizers  # whose hooks see every optimizer's step
from stronghold.offload.company import Alone, Company, follow, from_rank0, keep_activations
from stronghold.offload.compiled import uncompiled
from stronghold.offload.engine import Engine
from stronghold.offload.offload import close, engine_of, offload, offload_shared, report, trace, verify
from stronghold.offload.writing import writing

__all__ = [
    "Alone",
    "Company",
    "Engine",
    "close",
    "engine_of",
    "follow",
    "from_rank0",
    "keep_activations",
    "offload",
    "offload_shared",
    "report",
    "trace",
    "uncompiled",
    "verify",
    "writing",
]
