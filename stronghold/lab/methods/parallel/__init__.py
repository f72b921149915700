"""Training in stages and replicas, as the loop and the method see it."""

from stronghold.lab.methods.parallel.joining import join, processes_of, records_of
from stronghold.lab.methods.parallel.replicated import Replicated, replicas_of
from stronghold.lab.methods.parallel.staged import Staged, report_of, stages_of

__all__ = [
    "Replicated",
    "Staged",
    "join",
    "processes_of",
    "records_of",
    "replicas_of",
    "report_of",
    "stages_of",
]
