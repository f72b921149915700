"""A store's directories that a checkpoint in place has kept: opened as they are, or refused as they are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from stronghold.device import Device
from stronghold.errors import CheckpointError, CorruptionError, StoreError
from stronghold.formats.manifest import Manifest, PlacedEntry, TensorEntry, UnitFileEntry
from stronghold.formats.reader import FileReader
from stronghold.native import Disk
from stronghold.store.store import Store
from stronghold.store.unit_file import UnitFile, file_bytes
from stronghold.unit import Unit


def file_name(path: Path, directory: Path) -> str:
    """Returns how a checkpoint in ``directory`` names a unit's file, which may be in another one of the store's."""
    return path.name if path.parent == directory else os.path.abspath(path)


def open_kept(
    disk: Disk, device: Device, kept: Manifest, files: Sequence[tuple[str, Sequence[Path], int]]
) -> dict[int, UnitFile]:
    """Opens the units' files of the store that was ``kept``, once every byte was compared with its checksum.

    ``files`` are the units' names, the paths of each one's files, and their capacities; what is returned goes by their
    numbers there. Nothing is written. Raises CheckpointError and CorruptionError, which name file and unit, and
    StoreError.
    """
    for name in kept.files:
        with FileReader(kept, name) as file:  # all are there, and as long as they were
            for tensor in () if isinstance(file.entry, UnitFileEntry) else file.entry.tensors:
                file.check(tensor)
    found = {}
    for number, (unit, paths, capacity) in enumerate(files):
        names = [file_name(path, kept.directory) for path in paths]
        entry = kept.files.get(names[0])
        if not isinstance(entry, UnitFileEntry):
            continue
        if entry.parts != names:
            raise otherwise(kept, f"{unit} in {', '.join(names)}", f"in {', '.join(entry.parts)}")
        if file_bytes(capacity) != entry.length_bytes:
            raise otherwise(kept, f"{unit} in a file of {file_bytes(capacity)} bytes", f"{entry.length_bytes}")
        opened = found[number] = UnitFile(disk, device, paths, unit, capacity, kept=entry)
        with FileReader(kept, names[0]) as file:
            _verify(opened, entry, file)
    return found


def _verify(opened: UnitFile, entry: UnitFileEntry, file: FileReader) -> None:
    """Reads a unit's file once, and once more where something in it is not what was written, to say what."""
    wrong: list[CheckpointError] = []

    def look(name: str, octets: Tensor) -> None:
        if (error := file.wrong(name, octets)) is not None:
            wrong.append(error)

    if opened.take_sums(entry, look):
        if wrong:
            raise wrong[0]
        return
    for tensor in entry.tensors:
        file.check(tensor)
    where = ", ".join(map(str, opened.paths))
    raise CorruptionError(
        f"the file of {opened.name} is damaged: something beside its tensors is not what was written ({where}); load "
        "another checkpoint",
        where,
    )


def in_memory(
    kept: Manifest, store: Store, unit: Unit, names: Iterable[str], tensors: Mapping[str, Tensor], *, whole: bool
) -> list[str]:
    """Returns which of a unit's ``tensors`` the store has in memory, and which are to be read therefore.

    All others lie in the file that was kept, where they were. ``names`` are those of its parameters; the tensors are
    all that is kept of them, or with ``whole`` False some. Raises StoreError where what was kept of one lies elsewhere,
    or is of another format.
    """
    there = {
        tensor: _describe(entry, (file, entry.offset) if isinstance(entry, PlacedEntry) else None)
        for file in dict.fromkeys(file for name in names for file in kept.parameters[name].files)
        for tensor, entry in kept.files[file].tensors.items()
    }
    here = {
        name: _describe(TensorEntry(dtype=str(t.dtype)[6:], shape=list(t.shape), crc32c=0), store.find(unit, t))
        for name, t in tensors.items()
    }
    for name in [*here, *(there if whole else ())]:
        if here.get(name) != there.get(name):
            raise otherwise(kept, f"{name}: {here.get(name, 'none')}", f"{there.get(name, 'none')}")
    return [name for name, tensor in tensors.items() if store.find(unit, tensor) is None]


def _describe(entry: TensorEntry, place: tuple[str, int] | None) -> str:
    where = "in memory" if place is None else f"at byte {place[1]} of {place[0]}"
    return f"{entry.dtype} {entry.shape} {where}"


def otherwise(kept: Manifest, here: str, there: str) -> StoreError:
    """Returns what is raised where a model is placed ``here`` otherwise than what was kept ``there``."""
    return StoreError(
        f"a store is reopened as it was kept (got {here}, and in {kept.directory} after step {kept.step:g} {there}); "
        "pass the dtype, memory budgets, resident layers, directories and AdamW states that it was kept with, or load "
        f"the checkpoint {kept.directory} into a store in another directory"
    )
