"""A run's folder of checkpoints, one for each of the newest saved steps."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from stronghold.errors import StrongholdError
from stronghold.formats.lock import locked_to_read
from stronghold.formats.manifest import Manifest, read_manifest
from stronghold.formats.reader import verify
from stronghold.formats.sync import sync_directory


def step_path(folder: str | Path, step: int) -> Path:
    """Returns where the checkpoint after ``step`` is, or goes."""
    return Path(folder) / f"step-{step:06}"


def steps_in(folder: str | Path) -> dict[int, Path]:
    """Returns the checkpoints in ``folder``, intact or not, by their step, in its order."""
    folder = Path(folder)
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def newest(folder: str | Path) -> tuple[Manifest | None, dict[Path, str]]:
    """Returns the newest intact checkpoint in ``folder``, or None, and what was skipped before it, with the reason.

    Every byte is read and compared with its checksum.
    """
    skipped = {}
    for path in reversed(steps_in(folder).values()):
        try:
            with locked_to_read(path):
                manifest = read_manifest(path)
                verify(manifest)
        except (StrongholdError, OSError) as error:
            skipped[path] = str(error)
        else:
            return manifest, skipped
    return None, skipped


def prune(folder: str | Path, step: int, keep: int, damaged: Collection[Path] = ()) -> dict[Path, str]:
    """Removes all but the ``keep`` newest checkpoints up to ``step``, and those known to be ``damaged``.

    Each loses its name before its files: what is still called a checkpoint is whole. Returns what cannot be removed,
    with the reason: a file that another machine has open on a network's disk, say, which must end no run.
    """
    folder, left = Path(folder), dict[Path, str]()
    stale = [*folder.glob(".step-*.removed"), *folder.glob(".step-*.partial")]  # of a process that was killed
    known = [path for number, path in steps_in(folder).items() if number <= step]
    intact = [path for path in known if path not in damaged]
    for path in (*stale, *(path for path in known if path not in intact[-keep:])):
        try:
            _delete(path if path in stale else _hide(path))
        except OSError as error:
            left[path] = error.strerror or str(error)
    return left


def remove(path: Path) -> None:
    """Removes one checkpoint, or a file or a link that has its name."""
    _delete(_hide(path))


def make_way(path: Path) -> None:
    """Takes its name from what is called like a checkpoint, and leaves to :func:`prune` what cannot be removed."""
    hidden = _hide(path)
    with contextlib.suppress(OSError):
        _delete(hidden)


def _hide(path: Path) -> Path:
    """Renames a checkpoint, durably, to what none is called; returns that path."""
    hidden = path.with_name(f".{path.name}.removed")
    number = 1
    while os.path.lexists(hidden):  # of a process that was killed
        try:
            _delete(hidden)
        except OSError:
            hidden = path.with_name(f".{path.name}.{number}.removed")
            number += 1
    path.rename(hidden)
    sync_directory(path.parent)
    return hidden


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
