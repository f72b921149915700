"""Trains models larger than the device's memory: a window of layers on the device, the rest in RAM."""

from stronghold import checkpoint
from stronghold.checkpoint.pretrained import load, save
from stronghold.distributed import pipeline, replicate
from stronghold.distributed.plan import plan
from stronghold.engine import close, offload, report, trace, verify, writing
from stronghold.engine.adamw import AdamW
from stronghold.engine.muon import Muon
from stronghold.engine.split_experts import split_experts
from stronghold.probing import probe
from stronghold.version import __version__

__all__ = [
    "AdamW",
    "Muon",
    "__version__",
    "checkpoint",
    "close",
    "load",
    "offload",
    "pipeline",
    "plan",
    "probe",
    "replicate",
    "report",
    "save",
    "split_experts",
    "trace",
    "verify",
    "writing",
]
