"""Stages and replicas: a model over several processes, on ``torch.distributed``."""

from stronghold.distributed.pipeline import in_stages, pipeline
from stronghold.distributed.processes import Processes
from stronghold.distributed.replicate import replicate, replicated
from stronghold.distributed.staged import StagedModule

__all__ = ["Processes", "StagedModule", "in_stages", "pipeline", "replicate", "replicated"]
