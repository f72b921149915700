"""The lock of a store's directory: one run may change what is there, or any number of readers may read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from stronghold.errors import StoreError

LOCK = "lock"


def lock_to_change(directory: Path) -> int:
    """Takes the lock for a run, until :func:`unlock` has the descriptor that it returns. Raises StoreError."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(
            f"the store's directory {directory} cannot be written ({error.strerror}); pass a directory that this "
            "user may write"
        ) from error
    _take(descriptor, fcntl.LOCK_EX, directory)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def unlock(descriptor: int) -> None:
    """Gives a lock back, and closes the descriptor that :func:`lock_to_change` returned.

    A child of fork, such as a worker of a DataLoader, has the descriptor as well, and to close it here alone would
    leave the lock taken until the child ends. In a child this is not to be called: the lock is its parent's.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_lock_of(directory: Path, descriptor: int) -> bool:
    """Whether what is now at the directory's path has the lock that :func:`lock_to_change` took there.

    Who removed the directory may have made another one, of which another run has the lock.
    """
    return is_at(directory / LOCK, os.fstat(descriptor))


def is_at(path: Path, file: os.stat_result) -> bool:
    """Whether what is now at ``path`` is this file."""
    try:
        return os.path.samestat(os.stat(path), file)
    except OSError:
        return False


@contextlib.contextmanager
def locked_to_read(directory: Path) -> Iterator[None]:
    """Keeps runs from changing what is in a store's directory. Raises StoreError where one has it open.

    A directory without the file of the lock is nobody's: a copy.
    """
    try:
        # Not blocking: a named pipe of this name has no writer to wait for.
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    _take(descriptor, fcntl.LOCK_SH, directory)
    try:
        yield
    finally:
        unlock(descriptor)


def _take(descriptor: int, kind: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if owner == str(os.getpid()):
            raise StoreError(
                f"the store at {directory} is in use by another model of this process (process {owner}); call "
                "stronghold.close(model) on that one, or delete it and its optimizer, or pass another directory"
            ) from None
        raise StoreError(
            f"the store at {directory} is in use by another run (process {owner or 'unknown'}); end that one, or "
            "pass another directory"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"a store's directory must be on a file system with locks (got {error.strerror} at {directory}); pass a "
            "directory on another one"
        ) from error
