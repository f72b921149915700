"""Stages and replicas: a model over several processes, on ``torch.distributed``."""

from stronghold.parallel.pipeline import in_stages, pipeline
from stronghold.parallel.processes import Processes
from stronghold.parallel.replicate import replicate, replicated
from stronghold.parallel.staged import StagedModule

__all__ = ["Processes", "StagedModule", "in_stages", "pipeline", "replicate", "replicated"]
