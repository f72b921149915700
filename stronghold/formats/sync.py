"""When what was made, written, renamed or removed would survive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Blocks until the entries of a directory are on disk."""
    _sync(path, os.O_DIRECTORY)


def sync_path(path: Path) -> None:
    """Blocks until a file's bytes, or a directory's entries, are on disk; a link is an entry of its directory."""
    if not path.is_symlink():
        _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
