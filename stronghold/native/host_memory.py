"""How much host memory this process can come to have at all, whatever is free at the moment."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import psutil

from stronghold.native.cgroups import MEMBERSHIPS, ROOT, cgroups


def most_host_bytes(held_bytes: int, memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> int:
    """Returns how much more than ``held_bytes`` this process can come to have, 0 or more.

    It is the least of what the machine's memory, the cgroups' limits (both with swap) and the process's limit of
    addresses (``ulimit -v``) leave, if nobody else took anything.
    """
    swap = psutil.swap_memory().total
    most = psutil.virtual_memory().total + swap
    for directory, version in cgroups("memory", memberships, root):
        most = min(most, (_limit_v2 if version == 2 else _limit_v1)(directory, swap))
    room = most - held_bytes
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        room = min(room, addresses - psutil.Process().memory_info().vms)
    return max(0, int(room))


def host_bytes(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> int:
    """Returns the memory that there is to plan with: the machine's, or what cgroups leave of it, without swap.

    Pinned memory cannot be swapped, and a step that reads and writes all of it would wait for a disk.
    """
    most = float(psutil.virtual_memory().total)
    for directory, version in cgroups("memory", memberships, root):
        most = min(most, _number(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes")))
    return int(most)


def _limit_v2(directory: Path, swap: int) -> float:
    return _number(directory / "memory.max") + min(swap, _number(directory / "memory.swap.max"))


def _limit_v1(directory: Path, swap: int) -> float:
    memory, with_swap = (_number(directory / f"memory.{of}limit_in_bytes") for of in ("", "memsw."))
    return min(memory + swap, with_swap)


def _number(path: Path) -> float:
    """Returns the limit in a file, infinity where there is none."""
    try:
        text = path.read_text().strip()
        return math.inf if text == "max" else int(text)
    except (OSError, ValueError):  # the root's group has no such file, nor has a system that does not count swap
        return math.inf
