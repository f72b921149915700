"""Units that have not changed since they were last written: the next checkpoint links to the same file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stronghold.checkpoint.unit_tensors import step_of
from stronghold.engine.adamw import AdamW
from stronghold.formats.manifest import FileEntry, name_of
from stronghold.native import Blocks
from stronghold.optim.states import moments_of
from stronghold.unit import Unit


@dataclass(frozen=True)
class _KeptFile:
    path: Path
    entry: FileEntry
    file: tuple[int, ...]
    optimizer: weakref.ref[AdamW]
    state: tuple[Any, ...]


_KEPT: weakref.WeakKeyDictionary[Unit, _KeptFile] = weakref.WeakKeyDictionary()


def remember(unit: Unit, optimizer: AdamW, path: Path, entry: FileEntry) -> None:
    """Notes that ``path`` holds a unit as it is now."""
    _KEPT[unit] = _KeptFile(path, entry, _identity(path), weakref.ref(optimizer), _state(unit, optimizer))


def link_unchanged(unit: Unit, optimizer: AdamW, tensors: Mapping[str, Tensor], target: Path) -> FileEntry | None:
    """Makes ``target`` the same file as that of the last checkpoint beside it, where the unit is still as there.

    Returns None where it is not, or the system has no such links, or the file has changed hands since. What the user
    wrote must have been taken over before.
    """
    kept = _KEPT.get(unit)
    if kept is None or kept.path.parent.parent != target.parent.parent:
        return None
    form = {name: (name_of(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    same = (
        kept.optimizer() is optimizer
        and kept.state == _state(unit, optimizer)
        and form == {name: (entry.dtype, entry.shape) for name, entry in kept.entry.tensors.items()}
    )
    if not same:
        return None
    try:
        if _identity(kept.path) != kept.file:
            return None
        os.link(kept.path, target)
    except OSError:
        return None
    return kept.entry


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _state(unit: Unit, optimizer: AdamW) -> tuple[Any, ...]:
    """What changes whenever a unit does: by an update, a write that its parameters noticed, a write into a moment."""
    states = optimizer.state
    found: list[Any] = []
    for parameter in unit.parameters:
        state = states.get(parameter) or {}
        for key in moments_of(state):
            moment = state[key]
            found += [
                m._version for m in ((moment.codes, moment.exponents) if isinstance(moment, Blocks) else (moment,))
            ]
        found.append(step_of(parameter, states))
    return unit.generation, unit.writes, *found
