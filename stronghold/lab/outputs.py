"""Outputs: what a command is to write is tried before it computes, and nothing of that stays."""

from __future__ import annotations

import os
import stat
import tempfile
from typing import NoReturn

PathLike = str | os.PathLike[str]


def check_file(name: str, path: PathLike) -> None:
    """Raises ValueError, which calls it ``name``, unless a file at ``path`` can be written, or made with its folders.

    What is there keeps its content; a pipe or a device is not opened.
    """
    text = os.fspath(path)
    if not text or text.endswith(os.sep):
        _refuse(name, "a file", text, "no file's name")
    try:
        try:
            mode = os.stat(text).st_mode
        except FileNotFoundError:
            _try_in_nearest(os.path.dirname(os.path.realpath(text)))
        else:
            if stat.S_ISDIR(mode):
                _refuse(name, "a file", text, "a directory")
            if stat.S_ISREG(mode):
                os.close(os.open(text, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        _refuse(name, "a file", text, error.strerror or str(error))


def check_folder(name: str, path: PathLike) -> None:
    """Raises ValueError, which calls it ``name``, unless ``path`` can be made with its parents, or written into."""
    text = os.fspath(path)
    if not text:
        _refuse(name, "a folder", text, "no folder's name")
    try:
        _try_in_nearest(os.path.realpath(text))
    except OSError as error:
        _refuse(name, "a folder", text, error.strerror or str(error))


def _try_in_nearest(folder: str) -> None:
    """Makes a file without a name in ``folder``, or in the nearest one above it that is there."""
    while True:
        try:
            os.stat(folder)
        except FileNotFoundError:
            folder = os.path.dirname(folder)
        else:
            break
    tempfile.TemporaryFile(dir=folder).close()


def _refuse(name: str, kind: str, path: str, reason: str) -> NoReturn:
    raise ValueError(
        f"{name} must be {kind} that can be written (got {path!r}: {reason}); pass another path, or change what may be "
        "written there"
    )
