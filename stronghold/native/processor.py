"""How many threads this process can run at once."""

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Returns how many threads can run at once: 1 or more, within CPU affinity and the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    # A quota of 2.5 cores is spent by three threads before the period ends, and all three then stand still.
    return cores if quota >= cores else max(1, math.floor(quota))


def _cgroup_quota(memberships: Path, root: Path) -> float:
    """Returns the cores that the cgroups above this process grant it, infinity where they set no limit.

    ``memberships`` is /proc/self/cgroup, one ``id:controllers:path`` per line; version 2 has an empty list of
    controllers. In a container the path may not exist under ``root``, whose own files are the container's.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "cpu", _quota_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):
            quota = min(quota, read(mount / directory))
    return quota


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
