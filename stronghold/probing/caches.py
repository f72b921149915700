"""How large the caches of a device are: what is measured out of them must be larger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

PROCESSORS = Path("/sys/devices/system/cpu")
LEAST_BYTES = 2**20


class _Cache(NamedTuple):
    folder: str
    cores: str
    """Those that share it."""
    size: int


def cache_bytes(device: torch.device) -> int:
    """Returns the size of the largest cache of the device, where it can be told, at least LEAST_BYTES."""
    if device.type == "cpu":
        found = max((cache.size for cache in _caches()), default=0)
    else:
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        found = int(getattr(properties(device), "L2_cache_size", 0)) if properties is not None else 0
    return max(found, LEAST_BYTES)


def all_cache_bytes(device: torch.device) -> int:
    """Returns what all caches of the device hold together; of the CPU those of the cores that may be used."""
    if device.type != "cpu":
        return cache_bytes(device)
    return max(sum(cache.size for cache in {*_caches()}), LEAST_BYTES)


def _caches() -> Iterator[_Cache]:
    """Yields the caches of each core, one that several share for each of them."""
    for core in os.sched_getaffinity(0):
        for folder in PROCESSORS.glob(f"cpu{core}/cache/index*"):
            try:
                size, cores = ((folder / name).read_text().strip() for name in ("size", "shared_cpu_list"))
            except OSError:
                continue
            scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 1)
            yield _Cache(folder.name, cores, int(size.rstrip("KMG") or 0) * scale)
