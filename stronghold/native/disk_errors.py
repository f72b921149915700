"""What the disk has to say to the user: its errors with their remedies, and the warning of buffered files."""

import errno
import os
import re
import warnings
from pathlib import Path

from stronghold.errors import CorruptionError, DiskError
from stronghold.native.extension import _C
from stronghold.units import format_bytes

_REMEDIES = {
    errno.EIO: "the device fails: look into the kernel's log (dmesg), and go on from a checkpoint elsewhere",
    errno.ENOENT: "check the path, or create the file",
    errno.EACCES: "grant this user the rights, or pass another path",
    errno.EPERM: "grant this user the rights, or pass another path",
    errno.EROFS: "mount the file system for writing, or pass another path",
    errno.EISDIR: "pass the path of a file",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or use a file system that holds larger files",
    errno.EDQUOT: "free space within the quota, or have it raised",
    errno.ENOMEM: "free host memory",
}
_KINDS = {
    "ended": "it was cut, or never written to its end: go on from a checkpoint that is whole",
    "dropped": "wait for transfers, or drain the disk, before closing it",
}


def translated(error: _C.DiskError) -> DiskError | CorruptionError:
    """Returns the exception that the user gets for what the extension has thrown."""
    message, kind, operation, path, offset, length, number, expected, found = error.args
    if kind == "altered":
        return CorruptionError(
            f"{message}; go on from a checkpoint, and if it happens again, look after the device and the memory",
            path,
            offset,
            length,
            expected,
            found,
        )
    remedy = _KINDS.get(kind, "") if kind != "system" else _REMEDIES.get(number, "")
    if kind == "system" and number == errno.ENOSPC:
        message, remedy = f"the disk is full: {message}", _space_wanted(operation, path, length)
    return DiskError(
        f"{message}; {remedy}" if remedy else message,
        operation,
        path,
        offset,
        length,
        number if kind == "system" else None,
    )


def _space_wanted(operation: str, path: str, length: int) -> str:
    try:
        status, system = os.stat(path), os.statvfs(path)
    except OSError:
        return "free space there, or use a path on a larger disk"
    free = system.f_bavail * system.f_frsize
    needed = length - status.st_blocks * 512 if operation == "reserve" else length
    return (
        f"{format_bytes(max(needed, 0))} are needed and {format_bytes(free)} are free: free "
        f"{format_bytes(max(needed - free, 0) or needed)} there, or use a path on a larger disk"
    )


class BufferedDiskWarning(UserWarning):
    """Transfers of a file go through the page cache, because its file system refuses direct I/O."""


class UnreservedDiskWarning(RuntimeWarning):
    """A file's space is not promised by its file system: the disk may be full in the middle of a training."""


_warned: set[tuple[type[Warning], int]] = set()  # of what, for which file system


def warn_of_buffering(path: str) -> None:
    """Warns, once for each file system, that the file at ``path`` is not direct."""
    _warn_once(
        path,
        "refuses direct I/O (O_DIRECT): its transfers go through the page cache, which takes host memory and hides the "
        "disk's speed; use a path on ext4 or XFS on a local disk",
        BufferedDiskWarning,
    )


def warn_of_no_reserve(path: str) -> None:
    """Warns, once for each file system, that it takes no promise of space for the file at ``path``."""
    _warn_once(
        path,
        "cannot reserve space (fallocate): should others fill it, a step fails in the middle with an error, and what "
        "is not in a checkpoint is lost; leave room there, or use a path on ext4 or XFS on a local disk",
        UnreservedDiskWarning,
    )


def _warn_once(path: str, what: str, category: type[Warning]) -> None:
    key = category, os.stat(path).st_dev
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"{path!r} lies on {file_system(path)}, which {what}", category, stacklevel=5)


def file_system(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the type and the place of the file system that holds ``path``, as in ``"tmpfs at '/dev/shm'"``."""
    best, found = "", "a file system"
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    real = os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        # Spaces and the like are octal there.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            best, found = point, f"{after.split(' ')[0]} at {point!r}"
    return found
