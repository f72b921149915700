"""How many threads this process can run at once."""

import math
import os
from pathlib import Path

from stronghold.native.cgroups import MEMBERSHIPS, ROOT, cgroups


def usable_cores() -> int:
    """Returns how many threads can run at once: 1 or more, within CPU affinity and the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(MEMBERSHIPS, ROOT)
    # A quota of 2.5 cores is spent by three threads before the period ends, and all three then stand still.
    return cores if quota >= cores else max(1, math.floor(quota))


def _cgroup_quota(memberships: Path, root: Path) -> float:
    """Returns the cores that the cgroups of this process grant it, infinity where they set no limit."""
    groups = cgroups("cpu", memberships, root)
    quotas = ((_quota_v2 if version == 2 else _quota_v1)(directory) for directory, version in groups)
    return min(quotas, default=math.inf)


def _quota_v2(directory: Path) -> float:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _quota_v1(directory: Path) -> float:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return math.inf if quota <= 0 else quota / int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf
