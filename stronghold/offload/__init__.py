"""Ties an ``nn.Module`` to a window."""

from stronghold.offload.company import Alone, Company, by_first, follow, keep_activations, keep_company
from stronghold.offload.engine import Engine
from stronghold.offload.offload import engine_of, offload, offload_shared, report, trace, verify

__all__ = [
    "Alone",
    "Company",
    "Engine",
    "by_first",
    "engine_of",
    "follow",
    "keep_activations",
    "keep_company",
    "offload",
    "offload_shared",
    "report",
    "trace",
    "verify",
]
