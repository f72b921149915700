"""The disk store: every unit in a file of its own on each drive, read and written past the system's cache."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from stronghold.device import Buffer, Device, Event, Stream, Wait, Waits
from stronghold.errors import StoreError
from stronghold.formats.manifest import Manifest as Checkpoint
from stronghold.formats.manifest import UnitFileEntry, name_of
from stronghold.layout import PAGE_BYTES, Part, lay_out
from stronghold.native import DISK_THREADS, Disk, DiskCounters, Priority
from stronghold.store.directory import Directory, Inventory, UnitRecord, check_free, check_same, refuse_replaced
from stronghold.store.input_file import InputFile
from stronghold.store.kept import file_name, open_kept, otherwise
from stronghold.store.limits import Budget
from stronghold.store.ram import InPlace
from stronghold.store.ring import DiskUpdateIO, Ring
from stronghold.store.staging import AHEAD, DiskStaging, Read, staging_bytes
from stronghold.store.store import Store, UpdateIO
from stronghold.store.unit_file import UnitFile
from stronghold.unit import Kind, Unit


class DiskStore(Store):
    """Keeps on disk what each unit has there (``Unit.on_disk``) and the rest in host memory.

    Weights go from disk straight into the slot where that is host memory; the window is then all the lookahead there
    is. Else they go through pinned staging, into which they are read before there is a slot for them. An update passes
    through the ring. The user sees a tensor through the page cache: parameters and moments are ordinary
    tensors.

    The directories are this run's alone, the same for all its replicas, and its files go when it ends: a store is
    memory. What a run that was killed has left there is overwritten by one of the same model; a directory of another
    model is refused.

    :meth:`seal` makes them a checkpoint, which stays; the first change after it makes them memory again. With
    ``reopen`` they must be one, which is verified whole and taken over as it is.
    """

    def __init__(
        self,
        device: Device,
        paths: Sequence[Path],
        units: Sequence[Unit],
        waits: Waits,
        budget: Budget | None = None,
        *,
        reopen: bool = False,
    ) -> None:
        super().__init__(device, budget)
        self.waits = waits
        self._replicas = units[0].replicas
        if reopen and self._replicas.local_world_size > 1:
            raise StoreError(
                f"a store that was kept is reopened by one process (got {self._replicas.local_world_size} replicas for "
                f"{paths[0]}); load a checkpoint in a directory of its own"
            )
        self.disk = Disk(threads=DISK_THREADS * len(paths))  # before the directory is taken: it may be refused
        self._records = {unit: _record(number, unit) for number, unit in enumerate(units)}
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self.has_all = True
        """Whether all units were there when the directory was taken over: it can be reopened with these alone."""
        self._files: dict[int, UnitFile] = {}
        """By the unit's number."""
        self._inputs: list[InputFile] = []
        self.reopened: Checkpoint | None = None
        """What was reopened, until its optimizer's states are in use as well."""
        self._directory = Directory(paths, ours=False)
        self._replicas.from_rank0(lambda: self._begin(reopen))
        # Not a method: it would keep the store alive.
        owned = self._files if self._replicas.local_rank == 0 else {}
        self._finalizer = weakref.finalize(self, _close, self._directory, self.disk, owned, self._inputs, os.getpid())
        if self.reopened is not None:
            try:
                files = [(unit.name, self._paths(unit), capacity_bytes(unit)) for unit in units]
                self._files.update(open_kept(self.disk, device, self.reopened, files))
            except BaseException:
                self.close()
                raise
        self.streams = [device.host_stream("ring")]
        self._ring = Ring(device, *self.streams)
        length = staging_bytes(units, device)
        self._staging = DiskStaging(device, waits, _reading_in(self), length) if length else None
        self._reading: dict[Unit, Event] = {}
        """When the newest read of each unit's weights is complete."""

    @property
    def paths(self) -> list[Path]:
        return self._directory.paths

    @property
    def disk_bytes(self) -> int:
        return sum(file.used_bytes for file in self._files.values()) // self._replicas.local_world_size

    def counters(self) -> DiskCounters:
        return self.disk.counters()

    def check_space(self, needed_bytes: Mapping[Unit, int], what: str) -> None:
        for unit in needed_bytes:
            unit.wait_updated()  # what an update works on cannot be given back yet

        def check() -> None:
            files = [(self._file_of(unit), length) for unit, length in needed_bytes.items()]
            more = sum(length if file is None else file.missing_bytes(length) for file, length in files)
            check_free(self.paths, more, what)

        try:
            check()
        except StoreError:
            gc.collect()  # an optimizer's parameter groups may refer to one another
            check()

    def missing_ring_bytes(self, needed_bytes: Mapping[Unit, int]) -> int:
        files = ((self._file_of(unit), length) for unit, length in needed_bytes.items())
        longest = max((length if file is None else file.held_bytes() + length for file, length in files), default=0)
        return self._ring.missing_bytes(longest) * self._replicas.local_world_size  # each has its own

    def input_file(self) -> InputFile:
        self._inputs.append(InputFile(self.disk, self.device, self.paths))
        return self._inputs[-1]

    def take_in(self, unit: Unit) -> None:
        super().take_in(unit)
        self._numbers[unit] = len(self._numbers)
        self.has_all = False

    def give_back(self, units: Sequence[Unit]) -> None:
        if not _has_states(units):
            self._ring = Ring(self.device, *self.streams)

    def place(self, unit: Unit, values: Iterable[Tensor] | None = None) -> None:
        super().place(unit, values)
        if (file := self._file_of(unit)) is not None:
            if self._replicas.local_rank == 0:
                file.sum_up()
            file.unmap()

    def place_kept(self, unit: Unit) -> None:
        """Gives a unit the memory that it had when it was kept: what is on disk is there, what is not is to be read."""
        unit.make_room(self)

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        return os.path.realpath(directory) == os.path.realpath(self.paths[0])

    def find(self, unit: Unit, tensor: Tensor) -> tuple[str, int] | None:
        file = self._file_of(unit)
        offset = None if file is None else file.find(tensor)
        return None if file is None or offset is None else (file_name(file.paths[0], self.paths[0]), offset)

    def entry(self, unit: Unit, tensors: Mapping[str, Tensor]) -> tuple[str, UnitFileEntry] | None:
        """Syncs and reads a unit's file; returns its name in a checkpoint in place and what to say of it there.

        None is for a unit with nothing on disk. Raises StoreError where that cannot be one: its states are not loaded,
        or the user holds its weights and may write them. Raises DiskError and CorruptionError.
        """
        self._check_loaded()
        if (file := self._file_of(unit)) is None or not file.used_bytes:
            return None
        if "weights" in unit.on_disk and unit.is_aliased:
            raise StoreError(
                f"nobody may hold a tensor over a weight while it is saved in place (got one over {unit.name}, such as "
                "p.data or state_dict() give), for what is written through it would change the checkpoint; drop it, or "
                "save into another directory"
            )
        names = [file_name(path, self.paths[0]) for path in file.paths]
        return names[0], file.entry(tensors, names)

    def check_in_place(self) -> None:
        """Raises StoreError where what the store has open is not at its place any more."""
        self._directory.check_in_place()
        refuse_replaced([path for unit in self._numbers if (file := self._file_of(unit)) for path in file.replaced()])

    def seal(self, checkpoint: Checkpoint, beside: Sequence[Path]) -> None:
        """Makes the directories a checkpoint; ``beside`` are what is not in units' files, named ``.partial`` so far."""
        self._directory.seal(checkpoint, beside)

    def loaded(self) -> None:
        """Called when all that was reopened is in use: from then on it may change."""
        self.reopened = None

    def written(self, unit: Unit) -> tuple[list[int], bool]:
        if (file := self._file_of(unit)) is None:
            return [], False
        pages, others = file.changed()
        spans = [(file.find(weight), weight.nbytes) for weight in unit.weight] if pages else []
        indices = [
            index
            for index, (begin, length) in enumerate(spans)
            if begin is not None and any(begin - PAGE_BYTES < page * PAGE_BYTES < begin + length for page in pages)
        ]
        return indices, others

    def drop(self, unit: Unit) -> None:
        if (file := self._file_of(unit)) is not None:
            file.drop()

    def allocate(self, unit: Unit, length_bytes: int, kind: Kind) -> Buffer:
        if unit.resident:
            return self.device.device_buffer(length_bytes)
        if kind in unit.on_disk:
            unit.wait_updated()  # what an update works on is still in use
            file, kept = self._file(unit), self.reopened is not None
            # It may be a part that was given back, which is what was saved.
            buffer = file.take(length_bytes, as_kept=kept, before=(lambda: None) if kept else self._directory.unseal)
            if kind == "moments":
                self._hold(file)
            return buffer
        memory = unit.replicas.memory(length_bytes)
        looked_at = kind == "weights"  # as in the RAM store
        return self.device.host_buffer(length_bytes, pinned=looked_at, private=not looked_at, memory=memory)

    def fetch(self, unit: Unit, target: Tensor) -> None:
        assert unit.buffer is not None
        if unit.lives("weights") != "disk":
            self.device.fetches.copy(target[: unit.layout.total_bytes], unit.buffer.flat)
        elif self._staging is None:
            self._begin_read(self.device.fetches, unit, target, Priority.FETCH)
        else:
            self._staging.fetch(unit, target)

    @property
    def lookahead(self) -> int:
        return AHEAD if self._staging is not None else 0

    def expect(self, units: Sequence[Unit]) -> None:
        if self._staging is not None:
            # What the user may write at any time is read when it is computed with.
            self._staging.expect([unit for unit in units if unit.lives("weights") == "disk" and not unit.is_aliased])

    def changed(self, unit: Unit) -> None:
        if self._staging is not None:
            self._staging.drop(unit)

    def start_over(self) -> None:
        if self._staging is not None:
            self._staging.start_over()

    def reading(self, unit: Unit) -> Event | None:
        return self._reading.get(unit, unit.fetched.event)

    def update_io(self, unit: Unit, operands: Sequence[Sequence[Tensor]], parts: Sequence[Part]) -> UpdateIO:
        self._check_loaded()
        if (file := self._file_of(unit)) is None:
            return InPlace(parts)
        self._hold(file)
        return DiskUpdateIO(self._ring, file, operands, parts, lambda: unit.is_aliased, self._directory.unseal)

    def _hold(self, file: UnitFile) -> None:
        """Has the ring hold updates of all that a unit has on disk."""
        if missing := self._ring.missing_bytes(file.taken_bytes) * self._replicas.local_world_size:
            what = "the ring through which layers on disk are updated"
            self.check_memory(host_bytes=missing, device_bytes=0, what=what)
            self._ring.hold(file.taken_bytes)

    def written_back(self, unit: Unit, done: Event) -> Event:
        if (file := self._file_of(unit)) is None:
            return done
        # What waits for the update reads the file: what the update wrote must have arrived there.
        self.waits.stream(self.device.disk, done, Wait.UPDATE_DONE)
        self.device.disk.submit(file.settle)
        return self.device.disk.record()

    def mark_dirty(self, unit: Unit) -> None:
        if (file := self._file_of(unit)) is None:
            return
        self._check_loaded()
        if self._directory.sealed:
            warnings.warn(
                f"{unit.name} may be written from now on (a tensor over it was asked for, or it was written), so that "
                f"{self.paths[0]} is no checkpoint any more; save it again in place",
                RuntimeWarning,
                stacklevel=2,
            )
            self._directory.unseal()
        file.forget_sums()

    def verify(self) -> None:
        """Reads everything and compares checksums. Raises CorruptionError, which names file and unit."""
        for unit in self._numbers:
            if (file := self._file_of(unit)) is not None:
                unit.wait_on_host()
                file.verify()

    def close(self) -> None:
        self._finalizer()

    def _begin(self, reopen: bool) -> None:
        """Takes the directory over, or refuses to: what is there is then another run's."""
        self._directory = Directory(self.paths)
        try:
            self._take_over(reopen)
        except BaseException:
            self._directory.release()
            raise

    def _take_over(self, reopen: bool) -> None:
        held, records = self._directory.read(), list(self._records.values())
        kept = self._directory.checkpoint()
        if held is not None:
            step = "" if kept is None else f", with a run after step {kept.step:g},"
            check_same(held, records, self.paths[0], step, any_dtype=reopen)
            for before, record in zip(held.units, records, strict=True):
                record.file = before.file  # another version may have called it otherwise
        if reopen:
            if kept is None:
                raise StoreError(
                    f"a store is reopened where a checkpoint was saved in place (got {self.paths[0]}, which has none: "
                    "nothing was saved there, or it has changed since); go on from another checkpoint"
                )
            for before, record in zip(held.units if held is not None else (), records, strict=False):
                if before.dtype != record.dtype:
                    raise otherwise(kept, f"{record.name} in {record.dtype}", f"in {before.dtype}")
            self.reopened = kept
            return
        if kept is not None:
            raise StoreError(
                f"the store at {self.paths[0]} holds a run after step {kept.step:g}, which this one would overwrite; "
                f"to go on with it pass weights={str(self.paths[0])!r} too and call stronghold.checkpoint.load, else "
                "pass another directory, or remove that one"
            )
        self._directory.clear()
        for unit in self._records:
            for path in self._paths(unit):
                path.unlink(missing_ok=True)
        self._directory.write(Inventory(units=records))

    def _begin_read(self, stream: Stream, unit: Unit, target: Tensor, priority: Priority) -> Event:
        """Reads a unit's weights in the order of ``stream``; returns the event after which they are there."""
        stream.run(lambda: self._read(unit, target, priority), moved_bytes=unit.layout.total_bytes)
        self._reading[unit] = done = stream.record()
        return done

    def _check_loaded(self) -> None:
        if self.reopened is not None:
            raise StoreError(
                f"the store at {self.paths[0]} was reopened after step {self.reopened.step:g}, and nothing there may "
                "be written before the optimizer has its states; build AdamW and call stronghold.checkpoint.load("
                f"{str(self.paths[0])!r}, model, optimizer) first"
            )

    def _paths(self, unit: Unit) -> list[Path]:
        return self._directory.files(self._numbers[unit], self._records[unit].file)

    def _read(self, unit: Unit, target: Tensor, priority: Priority) -> None:
        file, length = self._file(unit), unit.slot_bytes
        assert unit.buffer is not None
        begin = file.find(unit.buffer.flat)
        assert begin is not None
        file.wait(file.read(target[:length], begin, priority))

    def _file(self, unit: Unit) -> UnitFile:
        number = self._numbers[unit]
        if number not in self._files:
            self._directory.check_in_place()  # another run may have files of these names there by now
            paths = self._paths(unit)
            capacity, replicas = capacity_bytes(unit), self._replicas
            self._files[number] = UnitFile(self.disk, self.device, paths, unit.name, capacity, replicas=replicas)
        return self._files[number]

    def _file_of(self, unit: Unit) -> UnitFile | None:
        """Returns the file of a unit, or None for one that has nothing on disk."""
        return self._files.get(self._numbers[unit])


def _has_states(units: Sequence[Unit]) -> bool:
    return any("moments" in unit.on_disk and unit.trainable for unit in units)


def _reading_in(store: DiskStore) -> Read:
    """Returns how staging, which the store has, begins a read there."""
    reference = weakref.ref(store)

    def begin_read(stream: Stream, unit: Unit, target: Tensor, priority: Priority) -> Event:
        its = reference()
        assert its is not None
        return its._begin_read(stream, unit, target, priority)

    return begin_read


def capacity_bytes(unit: Unit) -> int:
    """Returns what a unit can come to take on disk: weights, remainders and fp32 moments of all its parameters.

    A page more for each tensor, as moments may be allocated one by one.
    """
    elements = [parameter.numel() for parameter in unit.parameters]
    sizes = [*unit.layout.sizes, *(2 * n for n in elements), *(4 * n for n in elements), *(4 * n for n in elements)]
    return lay_out(sizes, unit.alignment).total_bytes + PAGE_BYTES * len(sizes)


def _record(number: int, unit: Unit) -> UnitRecord:
    kind, dtypes = "root" if unit.is_root else "layer", [name_of(dtype) for dtype in unit.dtypes]
    return UnitRecord(
        file=f"{kind}-{number:05}.bin",
        name=unit.name,
        dtype=" ".join(dtypes if len(set(dtypes)) > 1 else dtypes[:1]),
        shapes=[list(shape) for shape in unit.shapes],
    )


def _close(
    directory: Directory, disk: Disk, units: dict[int, UnitFile], inputs: Sequence[InputFile], process: int
) -> None:
    if os.getpid() == process:  # a child of fork has neither the disk's threads nor the directory
        disk.close()
        for one in inputs:
            one.close()
        if not directory.is_ours:
            return
        if not directory.sealed:
            directory.remove([path for file in units.values() for path in file.paths])
            return
        for file in units.values():
            if not file.kept_bytes:
                directory.remove_files(file.paths)
        directory.release()
