"""Ties an ``nn.Module`` to a window."""

from stronghold.offload.engine import Engine
from stronghold.offload.offload import engine_of, offload, report, trace, verify

__all__ = ["Engine", "engine_of", "offload", "report", "trace", "verify"]
