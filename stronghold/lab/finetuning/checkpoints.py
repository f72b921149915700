"""The checkpoints of a run, in its folder: which of them is whole, what it is of, and how many stay."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stronghold.errors import CheckpointError, StrongholdError
from stronghold.formats.manifest import read_manifest
from stronghold.formats.reader import verify
from stronghold.formats.sync import sync_directory, sync_path
from stronghold.lab.real_paths import as_named, real_paths
from stronghold.trainer import FOLDER

SEAL = "finetune.json"
"""What is written into a checkpoint last, when all else in it is on disk."""
_CHECKED = ("trainer_state.json", "scheduler.pt", "rng_state.pth", "optimizer.pt", "adapter_model.safetensors")
"""What a run goes on from beside KeepEverything's folder, which has checksums of its own."""

_PLACES = ("model", "data", "eval_data", "path")
"""What of a run's settings are paths of what it reads: the same where they lead to the same."""
_NOTED_LATER = ("micro_batch", "activations")
"""What checkpoints of earlier versions do not tell."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that is whole: ``learned`` is what decided which numbers were learned, ``data`` the rows' fingerprint.

    ``places`` are where its paths led then.
    """

    path: Path
    step: int
    learned: dict[str, Any]
    places: dict[str, str]
    data: int


def seal(path: Path, *, step: int, learned: Mapping[str, Any], data: int) -> None:
    """Makes the folder at ``path``, which Trainer and the callbacks have written, a checkpoint to go on from."""
    for file in sorted(path.rglob("*")):
        sync_path(file)
    sums = {name: _crc(path / name) for name in _CHECKED if (path / name).is_file()}
    partial = path / f".{SEAL}.partial"
    told = {"step": step, "learned": learned, "data": data, "files": sums, FOLDER: (path / FOLDER).is_dir()}
    told["places"] = real_paths(learned, _PLACES)
    partial.write_text(json.dumps(told, default=str), encoding="utf-8")
    sync_path(partial)
    partial.replace(path / SEAL)
    sync_directory(path)
    sync_directory(path.parent)


def newest(out: str | Path, say: Callable[[str], None]) -> tuple[Checkpoint | None, set[Path]]:
    """Returns the newest checkpoint in the folder ``out`` that is whole, and the later ones, which are not.

    ``say`` is told of each of these. None is for a folder where none was ever written to its end; raises
    CheckpointError where some were, and none of them is whole.
    """
    paths, problems = _paths(out), dict[Path, str]()
    for path in reversed(paths):
        try:
            return _read(path), set(problems)
        except (StrongholdError, OSError) as error:
            problems[path] = f"{path}: {error}"
            say(f"skipped    {path}: {error}")
    if any(os.path.exists(path / SEAL) for path in problems):
        raise CheckpointError(
            f"a run goes on from a whole checkpoint (got {len(problems)} in {out}, none of them whole: "
            f"{'; '.join(problems.values())}); restore one, or begin a run in another folder"
        )
    return None, set(problems)


def check_same(found: Checkpoint, learned: Mapping[str, Any], data: int) -> None:
    """Raises ValueError where a run with other settings, or on other data, would go on from ``found``."""
    here = json.loads(json.dumps(learned, default=str))
    there = {name: here[name] for name in _NOTED_LATER if name in here} | found.learned
    there = as_named(here, there, found.places, _PLACES)
    others = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if others:
        listed = ", ".join(f"{name}={here.get(name)!r}, which was {there.get(name)!r}" for name in others)
        raise ValueError(
            f"a run goes on with the settings it began with (got {listed}, in {found.path}); pass the same, or begin a "
            "run in another folder"
        )
    if found.data != data:
        raise ValueError(
            f"a run goes on with the data it began with (got rows with CRC-32 {data:08x}, {found.data:08x} in "
            f"{found.path}); restore the data and the tokenizer, or begin a run in another folder"
        )


def check_empty(out: str | Path) -> None:
    """Raises ValueError where a run that begins would find checkpoints of another in ``out``."""
    if _paths(out):
        raise ValueError(
            f"a run's folder must not hold another run (got {str(out)!r}, which has checkpoints); resume it "
            "(--resume), pass another folder, or remove that one"
        )


def prune(out: str | Path, step: int, keep: int, damaged: Collection[Path] = ()) -> dict[Path, str]:
    """Removes all checkpoints in ``out`` up to ``step`` but the newest ``keep`` that are whole.

    Those without a seal, of whatever step, and those known to be ``damaged`` are not whole. Returns what cannot be
    removed, with the reason, which must end no run.
    """
    left = dict[Path, str]()
    sealed = [path for path in _paths(out) if os.path.isfile(path / SEAL)]  # False where it may not be looked at
    later = [path for path in sealed if _step_of(path) > step]
    whole = [path for path in sealed if path not in later and path not in damaged]
    for path in _paths(out):
        if path not in later and path not in whole[-keep:]:
            try:
                (path / SEAL).unlink(missing_ok=True)  # first: half of one must not look whole
                shutil.rmtree(path)
            except OSError as error:
                left[path] = error.strerror or str(error)
    return left


def remove_partial(out: str | Path) -> None:
    """Removes what processes that were killed have left in ``out`` of checkpoints that never got their names.

    Files that have the name of one go, too.
    """
    for stale in (*Path(out).glob(".checkpoint-*.partial"), *Path(out).glob(".checkpoint-*.removed")):
        shutil.rmtree(stale, ignore_errors=True)
    for stray in _paths(out):
        if not stray.is_dir():
            stray.unlink()


def _paths(out: str | Path) -> list[Path]:
    found = (path for path in Path(out).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _read(path: Path) -> Checkpoint:
    file = path / SEAL
    if not file.is_file():
        raise CheckpointError(f"it has no {SEAL}: it was not written to its end")
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        step, learned, data, sums, kept = (told[name] for name in ("step", "learned", "data", "files", FOLDER))
        places = told.get("places", {})  # checkpoints of earlier versions have none
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"its {SEAL} cannot be read ({error})") from error
    for name, crc in sums.items():
        if not (path / name).is_file() or _crc(path / name) != crc:
            raise CheckpointError(f"its {name} is not what was written")
    if kept:
        verify(read_manifest(path / FOLDER))
    return Checkpoint(path=path, step=step, learned=learned, places=places, data=data)


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc
