"""The processes of a run in stages: what they agree on, and where each keeps its records."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from stronghold.config import TrainSettings
from stronghold.offload import Alone, Company
from stronghold.parallel import Processes


def join(settings: TrainSettings) -> tuple[TrainSettings, Company]:
    """Returns the settings that all processes train with, and these processes.

    Raises ParallelError where they do not agree. Where a run goes may follow from the clock: process 0's is taken.
    """
    if settings.parallel.stages == 1:
        return settings, Alone()
    processes = Processes(torch.device(settings.device), wanted=settings.parallel.stages)
    processes.agree({name: value for name, value in settings.flat().items() if name not in ("out", "store", "log")})
    return processes.everyone(settings)[0], processes


def records_of(rank: int, settings: TrainSettings) -> TrainSettings:
    """Returns the settings for the records of process ``rank``, which are its own and go beside the others."""
    out = os.path.join(settings.out, f"process-{rank}")
    return replace(settings, out=out, save=None, log=None, record=None, checkpoint_every=None, keep_store=False)
