"""Mount points, whose place nothing that is written beside them can take."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def check_no_mount(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError where ``folder`` is a mount point, such as a container's volume.

    What is saved is written beside its folder and takes that one's place when it is whole, which the system refuses for
    a mount point; what lies beside one is on another file system, too.
    """
    if is_mount_point(folder):
        raise ValueError(
            "what is saved takes the place of its folder as a whole, and so that must not be a mount point (got "
            f"{os.fspath(folder)!r}); pass a folder in it, such as {os.path.join(folder, 'model')!r}"
        )


def is_mount_point(folder: str | os.PathLike[str]) -> bool:
    """Whether something is mounted at ``folder``, or where it points to: a file system, or a folder of the same one."""
    path = os.path.realpath(folder)
    if os.path.ismount(path):
        return True
    try:  # of a folder of the same file system ismount() does not know
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:  # not on Linux
        return False
    return os.fsencode(path) in [_unescaped(line.split(b" ")[4]) for line in lines]


def _unescaped(path: bytes) -> bytes:
    r"""Returns a path of mountinfo, where blanks, tabs, line ends and backslashes are such as ``\040``."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), path)
