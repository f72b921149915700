"""A run's directory: whose it is, and of which model."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stronghold.errors import StoreError

FORMAT = 1
_MANIFEST = "manifest.json"
_LOCK = "lock"


@dataclass
class UnitRecord:
    """What the manifest says of one unit, which has a file of its own in each directory."""

    file: str
    name: str
    dtype: str
    shapes: list[list[int]]

    def describes(self, other: UnitRecord) -> bool:
        """Whether both are the same unit of the same model."""
        return (self.name, self.dtype, self.shapes) == (other.name, other.dtype, other.shapes)


@dataclass
class Manifest:
    """Which model's units lie in a directory.

    It says nothing of their contents: a store is memory, and what lasts are checkpoints. It outlives a run that is
    killed.
    """

    units: list[UnitRecord]
    format: int = FORMAT


class Directory:
    """One or several directories that one run at a time uses; the manifest is in the first.

    Raises StoreError where another process uses one of them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._made: list[Path] = []
        self._locks: list[int] = []
        try:
            for path in self.paths:
                self._make(path)
                self._locks.append(_lock(path / _LOCK))
        except BaseException:
            self.release()
            raise

    @property
    def manifest_path(self) -> Path:
        return self.paths[0] / _MANIFEST

    def files(self, number: int, name: str) -> list[Path]:
        """Returns the files for the stripes of the unit with this number; units take turns in which has the first."""
        first = number % len(self.paths)
        return [path / name for path in self.paths[first:] + self.paths[:first]]

    def read(self) -> Manifest | None:
        """Returns the manifest, or None for a directory without a run. Raises StoreError for one that is not ours."""
        try:
            content = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise StoreError(
                    f"the store at {self.paths[0]} has format {content['format']}, and this version reads {FORMAT}; "
                    "use another directory, or remove it"
                )
            return Manifest(units=[UnitRecord(**unit) for unit in content["units"]])
        except FileNotFoundError:
            foreign = sorted(p.name for path in self.paths for p in path.iterdir() if p.name != _LOCK)
            if foreign:
                raise StoreError(
                    f"a store's directory must be new or empty, or hold a run (got {self.paths[0]} with "
                    f"{', '.join(foreign[:3])} and no {_MANIFEST}); pass another directory"
                ) from None
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.manifest_path} cannot be read ({type(error).__name__}: {error}): it was cut or altered; remove "
                "the directory and go on from a checkpoint"
            ) from error

    def write(self, manifest: Manifest) -> None:
        """Writes the manifest: it is the old one or the new one, whatever happens."""
        partial = self.manifest_path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.manifest_path)
        descriptor = os.open(self.paths[0], os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, files: Iterable[Path]) -> None:
        """Removes ``files`` and what else the run has made, the directories with it if they were made for it."""
        for path in [*files, self.manifest_path, self.manifest_path.with_suffix(".partial")]:
            path.unlink(missing_ok=True)
        for path in self.paths:
            (path / _LOCK).unlink(missing_ok=True)
        self.release()
        for path in reversed(self._made):
            if path.exists() and not any(path.iterdir()):
                path.rmdir()

    def release(self) -> None:
        """Lets other processes use the directory."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _make(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the store's directory {path} cannot be made ({error.strerror}); pass a directory that this user may "
                "write"
            ) from error
        self._made += reversed(missing)


def check_same(held: Manifest, wanted: Sequence[UnitRecord], path: Path) -> None:
    """Raises StoreError where a manifest is not of the model with the units ``wanted``, with the first difference."""
    differing: Any = next(
        ((a, b) for a, b in zip(held.units, wanted, strict=False) if not a.describes(b)),
        None if len(held.units) == len(wanted) else (len(held.units), len(wanted)),
    )
    if differing is None:
        return
    there, here = (
        f"{unit.name} of {unit.dtype} with shapes {unit.shapes}"[:200]
        if isinstance(unit, UnitRecord)
        else f"{unit} units"
        for unit in differing
    )
    raise StoreError(
        f"the store at {path} belongs to another model (it has {there}, this model {here}); pass another directory, or "
        "remove that one"
    )


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(
            f"the store's directory {path.parent} cannot be written ({error.strerror}); pass a directory that this "
            "user may write"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise StoreError(
            f"the store at {path.parent} is in use by another run (process {owner or 'unknown'}); end that one, or "
            "pass another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor
