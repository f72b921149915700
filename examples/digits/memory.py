"""What a stage takes of memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.filesize import decimal
from rich.table import Table
from torch import nn

import stronghold


def memory(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Returns the layers, parameters and bytes of this process's stage.

    On CUDA bytes are what stronghold holds in host memory, and the peaks of what PyTorch's allocator has given out and
    of what it has reserved of the device. The CPU has no such allocator: there they are what stronghold holds of the
    stage, and the most that the whole process has had in memory, the interpreter and its libraries with it.
    """
    report = stronghold.report(model)
    found = {"layers": report.layers, "parameters": report.parameters}
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {**found, "host": report.host_bytes, "allocated": allocated, "reserved": reserved}
    return {**found, "held": report.device_bytes + report.host_bytes, "resident": _peak_resident_bytes()}


COLUMNS = {
    "layers": "layers",
    "parameters": "parameters",
    "held": "held",
    "resident": "peak resident",
    "host": "on the host",
    "allocated": "allocated",
    "reserved": "reserved",
}


def table(stages: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Returns what each stage takes, a line each."""
    balance = f"balanced by {options.balance}" if isinstance(options.balance, str) else "as given"
    table = Table(title=f"{len(stages)} stages {balance}, {options.micro_batches} micro-batches")
    table.add_column("stage", justify="right")
    for name in stages[0]:
        table.add_column(COLUMNS[name], justify="right")
    for number, stage in enumerate(stages):
        counts = (f"{value:,}" if name in ("layers", "parameters") else decimal(value) for name, value in stage.items())
        table.add_row(str(number), *counts)
    return table


def _peak_resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
