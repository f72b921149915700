"""The host's optimizer: its states, and the updates that run beside the computation."""

from stronghold.optim.adamw import AdamW

__all__ = ["AdamW"]
