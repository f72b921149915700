"""The processes of a run in stages and replicas: what they agree on, and where each keeps its records."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from stronghold.distributed import Processes
from stronghold.lab.settings import TrainSettings
from stronghold.unit import ONE_PROCESS, ProcessGroup


def join(settings: TrainSettings) -> tuple[TrainSettings, ProcessGroup]:
    """Returns the settings that all processes train with, and these processes.

    Raises ParallelError where they do not agree. Where a run goes may follow from the clock: process 0's is taken.
    """
    if settings.parallel.alone:
        return settings, ONE_PROCESS
    processes = processes_of(settings)
    processes.agree({name: value for name, value in settings.flat().items() if name not in ("out", "store", "log")})
    return processes.all_gather_object(settings)[0], processes


def processes_of(settings: TrainSettings) -> Processes:
    """Returns the processes that train together. Raises ParallelError where they cannot be what is wanted."""
    wanted = settings.parallel
    count = wanted.stages * wanted.replicas
    return Processes(torch.device(settings.device), wanted=count, replicas=wanted.replicas)


def records_of(rank: int, settings: TrainSettings) -> TrainSettings:
    """Returns the settings for the records of process ``rank``, which are its own and go beside the others."""
    out = os.path.join(settings.out, f"process-{rank}")
    return replace(settings, out=out, save=None, log=None, record=None, checkpoint_every=None, keep_store=False)
