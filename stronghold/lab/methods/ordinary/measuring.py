"""Memory as the system and the device tell it."""

from __future__ import annotations

import psutil
import torch

from stronghold.lab.settings import TrainSettings
from stronghold.reports import Measured
from stronghold.step_times import StepTimes


def measure(
    settings: TrainSettings,
    parameters: int,
    *,
    held_device_bytes: int = 0,
    disk_bytes: int = 0,
    disk_paths: tuple[str, ...] = (),
    step: StepTimes | None = None,
) -> Measured:
    """Returns what is taken now. ``held_device_bytes`` stands where the device is the CPU, which does not count."""
    device = torch.device(settings.device)
    counts = device.type != "cpu"
    return Measured(
        parameters=parameters,
        device=str(device),
        dtype={"fp32": "float32", "bf16": "bfloat16"}[settings.dtype],
        device_bytes=torch.accelerator.memory_allocated(device) if counts else held_device_bytes,
        peak_device_bytes=torch.accelerator.max_memory_allocated(device) if counts else 0,
        host_bytes=psutil.Process().memory_info().rss,
        disk_bytes=disk_bytes,
        disk_paths=disk_paths,
        step=step,
    )
