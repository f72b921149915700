"""Opens a file that is to be read from its beginning to its end, and nothing else that has its name."""

from __future__ import annotations

import errno
import os
import stat
from typing import IO


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens the file at ``path`` to read, unbuffered.

    Raises OSError, naming it, where it is no regular file: to open a named pipe would wait for its writer, and to read
    a device such as /dev/zero would never end.
    """
    file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
