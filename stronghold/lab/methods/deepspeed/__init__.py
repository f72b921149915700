"""DeepSpeed's engine behind the protocol that all methods share; each method's file has its settings."""

from stronghold.lab.methods.deepspeed.engine import begin, prepare
from stronghold.lab.methods.deepspeed.settings import base_settings, stage_3
from stronghold.lab.methods.deepspeed.swap import Swap

__all__ = ["Swap", "base_settings", "begin", "prepare", "stage_3"]
