"""Makes a probe short: each measurement over little, so that a test sees that it is made, and not how large it is."""

import sys
from contextlib import nullcontext

import pytest

from stronghold.probing import beside, caches, disk_speed, link_speed, operator_speed, stopwatches, update_speed

SIZES = ((16, 48), ((32, 32), (32, 64)), 5e9)
ATTENTION = ((2, 2, 16, 16),)


def make_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["stronghold.probing.probe"], "process_link", lambda device: nullcontext([]))
    patch.setattr(operator_speed, "_HOST", SIZES)
    patch.setattr(operator_speed, "_ACCELERATOR", SIZES)
    patch.setattr(operator_speed, "_HOST_ATTENTION", ATTENTION)
    patch.setattr(operator_speed, "_ACCELERATOR_ATTENTION", ATTENTION)
    patch.setattr(operator_speed, "POOL_BYTES", 2**20)
    patch.setattr(caches, "PROCESSORS", caches.PROCESSORS / "none")
    patch.setattr(update_speed, "ELEMENTS", 2**16)
    patch.setattr(update_speed, "BESIDE_S", 0.01)
    patch.setattr(link_speed, "BUFFER_BYTES", 2**20)
    patch.setattr(link_speed, "LEAST_S", 0.001)
    patch.setattr(disk_speed, "CHUNK_BYTES", 2**20)
    patch.setattr(disk_speed, "SAMPLE_S", 0.01)
    patch.setattr(beside, "HOST_LAYER", (16, 32))
    patch.setattr(beside, "DEVICE_LAYER", (16, 32))
    patch.setattr(stopwatches, "BUSY_SIZE", 64)
    patch.setattr(stopwatches, "LEAST_S", 0.001)
