"""Ties an ``nn.Module`` to a window."""

from stronghold.offload.offload import engine_of, offload, report

__all__ = ["engine_of", "offload", "report"]
