"""Training in stages, as the loop and the method see it."""

from stronghold.methods.stages.joining import join, records_of
from stronghold.methods.stages.staged import Staged, cut, report_of

__all__ = ["Staged", "cut", "join", "records_of", "report_of"]
