"""PyTorch's random numbers, on the host and on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def drawn_apart(device: torch.device) -> AbstractContextManager[None]:
    """Has what is drawn within, on the host or on ``device``, change nothing of what is drawn behind it."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
