"""The device of the tests that are marked ``gpu``: a GPU where there is one, else the accelerator in software.

The second is there in a process of its own alone (``--accelerator``), for PyTorch then takes it for the machine's.
"""

from __future__ import annotations

import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
SOFT = None if ON_GPU else sys.modules.get("tests.accelerator.soft")
"""The accelerator in software and its controls, where it is what the tests run on."""
DEVICE = "cuda" if ON_GPU else "soft"

needs_device = pytest.mark.skipif(
    not ON_GPU and SOFT is None, reason="runs on a GPU, or on the accelerator in software: ./test.sh -m gpu"
)
needs_soft = pytest.mark.skipif(SOFT is None, reason="counts what the accelerator in software takes, to the byte")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="tells of what only a GPU has")


def sleep(milliseconds: int) -> None:
    """Keeps the device busy in the current stream, without waiting for it."""
    if SOFT is None:
        torch.cuda._sleep(milliseconds * 1_000_000)  # cycles
    else:
        SOFT.sleep(milliseconds)
