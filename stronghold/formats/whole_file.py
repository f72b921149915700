"""A file that is written as a whole: at any time it is the old one or the new one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Where a file may be written that no other can take the place of, as one that is mounted into a container."""


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes ``content``, text in UTF-8, to the file at ``path``, by way of a file beside it that takes its place.

    What a link leads to is written, with the permissions that it has; what is no file, such as a pipe, is written to as
    it is. Raises OSError with the name ``path``; then what was there is there still, and nothing else is.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.partial")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        try:
            beside.write_bytes(data)
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
        except OSError as error:
            beside.unlink(missing_ok=True)
            if error.errno not in _NOT_BESIDE or not target.exists():
                raise
            target.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
