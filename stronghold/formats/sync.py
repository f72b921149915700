"""When what was made, written, renamed or removed would survive a loss of power."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Blocks until the entries of a directory are on disk."""
    _sync(path, os.O_DIRECTORY)


def sync_path(path: Path) -> None:
    """Blocks until a file's bytes, or a directory's entries, are on disk; all else is an entry of its directory.

    Such as a link, or a named pipe, which opening would wait for.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
