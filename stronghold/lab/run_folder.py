"""A run's folder is written by one run at a time: two would remove each other's checkpoints and records."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

_taken: dict[str, int] = {}
"""How often each folder, by its real path, was taken by this process."""


@contextmanager
def taken(out: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other processes from taking a run's folder, where it is there, until the block ends.

    Raises ValueError where another one has it. Where the file system has no locks nothing is kept. The folder itself is
    locked, and not a file in it as in a store's: what a run leaves there are its results.
    """
    path = os.path.realpath(out)
    if not os.path.isdir(path):
        yield
        return
    descriptor = -1 if path in _taken else _locked(path, out)
    _taken[path] = _taken.get(path, 0) + 1
    try:
        yield
    finally:
        _taken[path] -= 1
        if not _taken[path]:
            del _taken[path]
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of fork, such as a DataLoader's worker, has it as well
            os.close(descriptor)


def _locked(path: str, out: str | os.PathLike[str]) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"a run's folder is written by one run at a time (got out={os.fspath(out)!r}, which another run is writing "
            "to); end that one, or pass another folder"
        ) from None
    except OSError:  # a network's file system may lock files alone, or nothing
        os.close(descriptor)
        return -1
    return descriptor
