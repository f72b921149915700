"""The control groups of Linux that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cgroups(controller: str, memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Yields the directory, and the version (1 or 2), of each group that may set a limit of ``controller``.

    They are the process's own and all above it. ``memberships`` is /proc/self/cgroup, one ``id:controllers:path`` per
    line; version 2 has an empty list of controllers. In a container the path may not exist under ``root``, whose own
    files are the container's.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:  # a system without them
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, version = (root / controller, 1) if controllers else (root, 2)
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):
            yield mount / directory, version
