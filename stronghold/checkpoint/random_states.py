"""The random generators' states: torch's on the CPU and on the model's device, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take_random_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of all generators that a training draws from."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Puts the generators where they were; that of a device without a saved state is left as it is."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
