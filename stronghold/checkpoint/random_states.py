"""The random generators' states: torch's on the CPU and on the model's device, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from stronghold.errors import CheckpointError


def take_random_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of all generators that a training draws from; a device's by its type, such as "cuda"."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def check_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Raises CheckpointError for states that the generators do not take, and leaves those as they are."""
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        if device.type != "cpu" and device.type in states:
            torch.Generator(device).set_state(states[device.type])
    except Exception as error:  # each generator refuses in its own way
        raise CheckpointError(
            f"a checkpoint's random states must be as they were written ({type(error).__name__}: {error}); it has been "
            "altered, pass another one"
        ) from error


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Puts the generators where they were; that of a device without a saved state is left as it is.

    So is that of another kind of device than the state was saved from, which has generators of its own.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
