"""A run's directory: whose it is, of which model, and whether it is a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stronghold.errors import CheckpointError, StoreError
from stronghold.formats.content import parsed
from stronghold.formats.lock import LOCK, is_at, is_lock_of, lock_to_change, unlock
from stronghold.formats.manifest import NAME, PARTIAL, Manifest, put_partial, read_manifest, write_partial
from stronghold.formats.sync import sync_directory
from stronghold.units import format_bytes

FORMAT = 1
_INVENTORY = "store.json"
_BESIDE = re.compile(r"((layer|root|edge)-\d{5}|buffers)\.safetensors(\.partial)?")
"""What a checkpoint in place has beside the units' own files; root parameters were called edges once."""


@dataclass
class UnitRecord:
    """What the inventory says of one unit, which has a file of its own in each directory.

    ``dtype`` is its parameters' compute type, or where they have several each one's, with a space between.
    """

    file: str
    name: str
    dtype: str
    shapes: list[list[int]]

    def describes(self, other: UnitRecord, *, any_dtype: bool = False) -> bool:
        """Whether both are the same unit of the same model."""
        same = (self.name, self.shapes) == (other.name, other.shapes)
        return same and (any_dtype or self.dtype == other.dtype)


@dataclass
class Inventory:
    """Which model's units lie in a directory.

    It says nothing of their contents: a store is memory, unless a checkpoint's manifest lies beside. It outlives a run
    that is killed.
    """

    units: list[UnitRecord]
    format: int = FORMAT


class Directory:
    """One or several directories that one run at a time uses; inventory and manifest are in the first.

    With a checkpoint's manifest there they are sealed, a checkpoint: that is written last, and removed before the first
    byte changes. Where they are not ``ours`` another process of this run has taken them. Raises StoreError where
    another run uses one of them.
    """

    def __init__(self, paths: Sequence[Path], *, ours: bool = True) -> None:
        self.paths = [path.absolute() for path in paths]  # the user's program may go to another directory
        self.is_ours = ours
        self._made: list[Path] = []
        self._locks: list[int] = []
        self.sealed = False
        self._manifest: os.stat_result | None = None
        """Of the checkpoint that the directories are."""
        self._unsealing = threading.Lock()  # by the caller, or by the thread that updates
        try:
            for path in self.paths if ours else ():
                self._make(path)
                self._locks.append(lock_to_change(path))
        except BaseException:
            self.release()
            raise

    @property
    def inventory_path(self) -> Path:
        return self.paths[0] / _INVENTORY

    @property
    def _partial_path(self) -> Path:
        return self.inventory_path.with_suffix(".partial")

    def files(self, number: int, name: str) -> list[Path]:
        """Returns the files for the stripes of the unit with this number; units take turns in which has the first."""
        first = number % len(self.paths)
        return [path / name for path in self.paths[first:] + self.paths[:first]]

    def read(self) -> Inventory | None:
        """Returns the inventory, or None for a directory without a run. Raises StoreError for one that is not ours."""
        try:
            content = parsed(self.inventory_path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise StoreError(
                    f"the store at {self.paths[0]} has format {content['format']}, and this version reads {FORMAT}; "
                    "use another directory, or remove it"
                )
            return Inventory(units=[UnitRecord(**unit) for unit in content["units"]])
        except FileNotFoundError:
            own = {LOCK, self._partial_path.name}  # the latter of a process that was killed, or a disk that was full
            foreign = sorted(p.name for path in self.paths for p in path.iterdir() if p.name not in own)
            if foreign and all(name.startswith("process-") for name in foreign):
                raise StoreError(
                    f"the store at {self.paths[0]} holds what a run in several processes had there, which did not end "
                    f"by itself ({', '.join(foreign[:3])}), and this one has another number of them; remove that "
                    "directory, for a store is memory: checkpoints are elsewhere"
                ) from None
            if foreign:
                raise StoreError(
                    f"a store's directory must be new or empty, or hold a run (got {self.paths[0]} with "
                    f"{', '.join(foreign[:3])} and no {_INVENTORY}); pass another directory"
                ) from None
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.inventory_path} cannot be read ({type(error).__name__}: {error}): it was cut or altered; "
                "remove the directory and go on from a checkpoint"
            ) from error

    def write(self, inventory: Inventory) -> None:
        """Writes the inventory: it is the old one or the new one, whatever happens."""
        partial = self._partial_path
        with partial.open("w", encoding="utf-8") as file:
            json.dump(asdict(inventory), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.inventory_path)
        sync_directory(self.paths[0])

    def checkpoint(self) -> Manifest | None:
        """Returns what the directory is a checkpoint of, or None. Raises StoreError for a manifest that is damaged."""
        if not (self.paths[0] / NAME).exists():
            return None
        self._note_sealed()
        try:
            return read_manifest(self.paths[0])
        except CheckpointError as error:
            raise StoreError(
                f"the store at {self.paths[0]} holds a run whose manifest cannot be read ({error}); pass another "
                "directory, or remove that one"
            ) from error

    def check_in_place(self) -> None:
        """Raises StoreError where what is at the directories' paths is not what this run has made there."""
        held = self._held() if self.is_ours else set(self.paths)
        gone = [path for path in self.paths if path not in held]
        if not gone and not self.inventory_path.exists():
            gone = [self.inventory_path]
        refuse_replaced(gone)

    def seal(self, checkpoint: Manifest, beside: Iterable[Path]) -> None:
        """Makes the directory a checkpoint, with the files ``beside`` those of the units, which end in ".partial".

        All files are on disk already. Raises OSError, and then the directory is as it was, or no checkpoint. Raises
        StoreError where it is not this run's any more.
        """
        self.check_in_place()
        write_partial(checkpoint)
        self.unseal()
        wanted = {path.rename(path.with_suffix("")) for path in beside}
        for path in self._beside():
            if path not in wanted:
                path.unlink()
        for directory in self.paths:
            sync_directory(directory)
        put_partial(self.paths[0])
        self._note_sealed()

    def _note_sealed(self) -> None:
        self.sealed, self._manifest = True, os.stat(self.paths[0] / NAME)

    def unseal(self) -> None:
        """Makes the directory memory again, durably: what a killed run leaves must not be taken for a checkpoint."""
        with self._unsealing:
            if self.sealed:
                if self._manifest is None or is_at(self.paths[0] / NAME, self._manifest):  # else it is another run's
                    (self.paths[0] / NAME).unlink(missing_ok=True)
                    sync_directory(self.paths[0])
                self.sealed, self._manifest = False, None

    def clear(self) -> None:
        """Removes what was beside the units' files when the directory was a checkpoint, or was to be one."""
        for path in [*self._beside(), self.paths[0] / PARTIAL]:
            path.unlink(missing_ok=True)

    def remove(self, files: Iterable[Path]) -> None:
        """Removes ``files`` and what else the run has made, the directories with it if they were made for it."""
        self.remove_files(files)
        held = self._held()
        if self.paths[0] in held:
            self.clear()
            for path in [self.inventory_path, self.inventory_path.with_suffix(".partial")]:
                path.unlink(missing_ok=True)
        for path in held:
            (path / LOCK).unlink(missing_ok=True)
        self.release()

    def remove_files(self, files: Iterable[Path]) -> None:
        """Removes those of ``files`` that are in directories which are still this run's."""
        held = self._held()
        for path in files:
            if path.parent in held:
                path.unlink(missing_ok=True)

    def _held(self) -> set[Path]:
        """Returns the directories whose lock this run has: another one may be at the same place meanwhile."""
        return {path for path, lock in zip(self.paths, self._locks, strict=False) if is_lock_of(path, lock)}

    def release(self) -> None:
        """Lets other processes use the directories; those that were made for this run and are empty go."""
        for path in self._held():
            if path in self._made and [p.name for p in path.iterdir()] == [LOCK]:
                (path / LOCK).unlink()
        for descriptor in self._locks:
            unlock(descriptor)
        self._locks.clear()
        for path in reversed(self._made):
            if path.exists() and not any(path.iterdir()):
                path.rmdir()

    def _beside(self) -> list[Path]:
        here = self.paths[0]
        return [path for path in (here.iterdir() if here.is_dir() else ()) if _BESIDE.fullmatch(path.name)]

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


def refuse_replaced(paths: Sequence[Path]) -> None:
    """Raises StoreError for ``paths`` at which there is not, or no more, what a run has made there."""
    if paths:
        raise StoreError(
            "a store's directories and files must stay until its run has ended (got "
            f"{', '.join(map(str, paths[:3]))}, which another program has removed or replaced since); save into "
            "another directory, for the run has all of the model still, and go on from there"
        )


def check_same(
    held: Inventory, wanted: Sequence[UnitRecord], path: Path, there_is: str = "", *, any_dtype: bool = False
) -> None:
    """Raises StoreError where an inventory is not of the model with the units ``wanted``, with the first difference."""
    differing: Any = next(
        ((a, b) for a, b in zip(held.units, wanted, strict=False) if not a.describes(b, any_dtype=any_dtype)),
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
        f"the store at {path}{there_is} belongs to another model (it has {there}, this model {here}); pass another "
        "directory, or remove that one"
    )


def check_free(paths: Sequence[Path], needed_bytes: int, what: str) -> None:
    """Raises StoreError where the file systems of ``paths`` do not have ``needed_bytes`` left, dealt out over them."""
    # Units, and stripes of them, are dealt out over the directories, which therefore each take about as much.
    on_drive: dict[int, list[Path]] = {}
    for path in paths:
        on_drive.setdefault(os.stat(path).st_dev, []).append(path)
    for there in on_drive.values():
        needed, free = needed_bytes * len(there) // len(paths), shutil.disk_usage(there[0]).free
        if needed > free:
            raise StoreError(
                f"{what} takes {format_bytes(needed)} at {', '.join(map(str, there))}, where {format_bytes(free)} "
                f"are free; free {format_bytes(needed - free)} more, or pass a directory on a larger disk"
            )


def forget(path: Path) -> None:
    """Makes a directory that is a checkpoint memory, which the next run of the same model overwrites."""
    directory = Directory([path])
    try:
        directory.sealed = True
        directory.unseal()
    finally:
        directory.release()
