"""Trains models larger than the device's memory: a window of layers on the device, the rest in RAM."""

from stronghold.offload import offload, report
from stronghold.optim import AdamW

__version__ = "0.1.0"

__all__ = ["AdamW", "__version__", "offload", "report"]
