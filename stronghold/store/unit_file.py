"""One unit's memory on disk: mapped for the user who looks at a tensor, read and written past the cache by us."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stronghold.device import Device
from stronghold.device.memory import HostBuffer, MappedBuffer
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.formats.lock import is_at
from stronghold.formats.manifest import PlacedEntry, UnitFileEntry, name_of
from stronghold.formats.stripes import Stripes
from stronghold.layout import PAGE_BYTES, round_up
from stronghold.native import PIECE_BYTES, Disk, DiskFile, Priority, Transfer, checksums, crc32c, warn_of_no_reserve
from stronghold.store.looked_at import looked_at
from stronghold.store.mapping import map_striped
from stronghold.unit import ONE_REPLICA, Replicas
from stronghold.units import format_bytes

_READ_AT_ONCE = 32 * 2**20
_COMPARED_AT_ONCE = 1024
"""Pages."""


def file_bytes(capacity_bytes: int) -> int:
    """Returns how long a unit's file is; what is not taken of it is not there."""
    return max(PAGE_BYTES, round_up(capacity_bytes, PAGE_BYTES))


class UnitFile:
    """Up to ``capacity_bytes`` in a file, or in stripes in several, of which as much is reserved as has been taken.

    They are mapped once, whole, so that a tensor in them is an ordinary one: who reads or writes such a tensor goes
    through the system's page cache, and the system keeps that coherent with direct transfers as long as the two take
    turns, which is what the engine's events are for. Every page has a checksum, zero where it is not known: a direct
    write sets it, a direct read compares, and a user who may write through the mapping makes it unknown.

    One that was ``kept`` is opened with what it holds: its parts are taken again in the same order, and found as they
    were left. ``replicas`` have the file in common, with its checksums, and each writes pages of its own.

    Raises DiskError where the system refuses, StoreError for a device with blocks larger than a page.
    """

    def __init__(
        self,
        disk: Disk,
        device: Device,
        paths: Sequence[Path],
        name: str,
        capacity_bytes: int,
        kept: UnitFileEntry | None = None,
        replicas: Replicas = ONE_REPLICA,
    ) -> None:
        self.paths = list(paths)
        self.name = name
        self.kept_bytes = 0 if kept is None else kept.taken_bytes
        """Part of a checkpoint in place; 0 for a file that is none."""
        self._disk = disk
        self._device = device
        self._replicas = replicas
        self.capacity_bytes = file_bytes(capacity_bytes)
        self.stripes = (
            Stripes.over(len(self.paths), self.capacity_bytes, PIECE_BYTES)
            if kept is None
            else Stripes(len(self.paths), kept.stripe_bytes)
        )
        self._files: list[DiskFile] = []
        if kept is None:
            replicas.from_rank0(self._create)
        if not self._files:
            self._files = [self._open(path) for path in self.paths]
        self._opened = [os.stat(path) for path in self.paths]
        self._memory = map_striped(self.paths, self.stripes, self.capacity_bytes)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self.taken_bytes = 0
        self._parts: list[tuple[int, weakref.ref[memoryview]]] = []
        """Where each part that was taken begins, and what its tensors keep alive."""
        self._used_once = self.kept_bytes
        """How far the file has ever been taken: what was given back of it is not zero."""
        pages = self.capacity_bytes // PAGE_BYTES
        self.sums = HostBuffer(4 * pages, memory=replicas.memory(4 * pages)).view(0, (pages,), torch.int32)
        self.writes: list[Transfer] = []
        """Under way, of the newest update."""
        self._versions: dict[int, int] = {}
        self._changed: list[int] = []
        """The pages that were written through the mapping since :meth:`changed` was last called."""
        self._looked_at = False
        """Whether pages without a checksum were looked at since, and may have been written."""
        self._looking = threading.Lock()  # a write is to be found once: by the caller, or by a thread that reads

    def take(
        self, length_bytes: int, *, as_kept: bool = False, before: Callable[[], object] = lambda: None
    ) -> MappedBuffer:
        """Reserves the next part of the file and returns it as memory: all zero, or with ``as_kept`` as it was kept.

        ``before`` is called once nothing refuses it any more, and before a byte changes. Parts at the end that nobody
        has a tensor over any more are given back first, as those of an optimizer that is gone. Replicas keep them, for
        each would know of its own tensors alone. Raises StoreError where the file has not so much left.
        """
        length = round_up(length_bytes, PAGE_BYTES)
        self._give_back()
        if self.taken_bytes + length > self.capacity_bytes:
            gc.collect()  # an optimizer's parameter groups may refer to one another
            self._give_back()
        begin, end = self.taken_bytes, self.taken_bytes + length
        if end > self.capacity_bytes:
            raise StoreError(
                f"{self.name} has {format_bytes(self.capacity_bytes - begin)} left on disk, where a layer has room for "
                f"the states of one optimizer (got a request for {format_bytes(length)}); delete the optimizer before, "
                "and all that refers to it or its states, or offload the model anew"
            )
        self._replicas.from_rank0(lambda: self._reserve(end))
        before()
        self.taken_bytes = end
        if not as_kept and begin < (used := min(self._used_once, end)):
            self.settle()
            torch.frombuffer(self._memory, dtype=torch.uint8, count=used - begin, offset=begin).zero_()
            self.sums_of(begin, used).zero_()
            self.drop()
        self._used_once = max(self._used_once, end)
        if not length:
            return MappedBuffer(self._memory, 0, begin)
        part = memoryview(self._memory)[begin:end]
        self._parts.append((begin, weakref.ref(part)))
        return MappedBuffer(part, length_bytes)

    def missing_bytes(self, length_bytes: int) -> int:
        """Returns what a part of ``length_bytes`` takes of the file system beside what is reserved already."""
        self._give_back()
        return max(0, self.taken_bytes + round_up(length_bytes, PAGE_BYTES) - self._used_once)

    def held_bytes(self) -> int:
        """Returns what of the file somebody has tensors over."""
        self._give_back()
        return self.taken_bytes

    def _give_back(self) -> None:
        while self._replicas.local_world_size == 1 and self._parts and self._parts[-1][1]() is None:
            self.taken_bytes, _ = self._parts.pop()

    def _reserve(self, length_bytes: int) -> None:
        for number, file in enumerate(self._files):
            if not file.reserve(self.stripes.share(number, length_bytes)):
                warn_of_no_reserve(file.path)

    @property
    def used_bytes(self) -> int:
        return max(self.taken_bytes, self.kept_bytes)

    def find(self, tensor: Tensor) -> int | None:
        """Returns where in the file a tensor lies, in bytes, or None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.capacity_bytes else None

    def sums_of(self, begin: int, end: int) -> Tensor:
        """Returns the checksums of the whole pages from ``begin`` to ``end``, in bytes."""
        return self.sums[begin // PAGE_BYTES : end // PAGE_BYTES]

    def sum_up(self) -> None:
        """Sets the checksums to those of what the mapping holds."""
        if self.taken_bytes:
            memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=self.taken_bytes)
            checksums(memory, self.sums_of(0, self.taken_bytes))

    def forget_sums(self) -> None:
        """Called before the user may write through the mapping: what the checksums say is not known from then on."""
        self.sums.zero_()

    def check_versions(self, tensors: Sequence[Tensor]) -> None:
        """Forgets the checksums where the user has written one of ``tensors``, by their versions, since the last time.

        A moment is a plain tensor to its user; parameters tell of writes themselves.
        """
        for tensor in tensors:
            place, version = tensor.data_ptr(), tensor._version
            if self._versions.setdefault(place, version) != version:
                self.forget_sums()
                self._versions[place] = version

    def unmap(self) -> None:
        """Takes the pages that were looked at out of the process's resident set; their contents stay.

        Only where the user is not writing them, so in no thread of ours: what is written between a comparison and this
        would be taken for corruption later.
        """
        self._memory.madvise(mmap.MADV_DONTNEED)

    def drop(self) -> None:
        """Takes the pages that were looked at out of the resident set. Not while an update is on its way."""
        with self._looking:
            looked_at = self._looked_at
            if self._compare_looks(0, self.taken_bytes):
                self.unmap()
            self._looked_at = looked_at

    def changed(self) -> tuple[list[int], bool]:
        """Returns which pages were written through the mapping since this was last called, though nothing told of it.

        And whether others may have been, for they were looked at and have no checksum to compare with. Not while an
        update is on its way.
        """
        with self._looking:
            if self._compare_looks(0, self.taken_bytes):
                self.unmap()
            changed, looked_at = self._changed, self._looked_at
            self._changed, self._looked_at = [], False
        return changed, looked_at

    def _compare_looks(self, begin: int, end: int) -> bool:
        """Forgets the checksums of pages that were written through the mapping; returns whether any were looked at."""
        if not len(seen := looked_at(self._base + begin, end - begin, PAGE_BYTES)):
            return False
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=self.capacity_bytes).view(-1, PAGE_BYTES)
        for pages in (torch.from_numpy(seen) + begin // PAGE_BYTES).split(_COMPARED_AT_ONCE):
            known, sums = self.sums[pages], torch.empty(len(pages), dtype=torch.int32, device="cpu")
            checksums(memory[pages].view(-1), sums)
            written = pages[(known != 0) & (known != sums)]
            self.sums[written] = 0
            self._changed += written.tolist()
            self._looked_at |= bool((known == 0).any())
        return True

    def read(self, target: Tensor, begin: int, priority: Priority, *, verify: bool = True) -> list[Transfer]:
        """Begins to fill ``target`` from byte ``begin`` on.

        What arrives is compared with its checksums, but for pages that were written through the mapping; without
        ``verify`` these are set to what arrives.
        """
        if verify:
            with self._looking:
                self._compare_looks(begin, begin + target.numel())
        begun = [
            self._disk.read(
                self._files[span.file],
                target[span.begin - begin : span.end - begin],
                offset=span.offset,
                priority=priority,
                sums=self.sums_of(span.begin, span.end),
                verify=verify,
            )
            for span in self.stripes.transfers(begin, begin + target.numel(), PIECE_BYTES)
        ]
        self._note("read", begun)
        return begun

    def write(self, source: Tensor, begin: int, *, summed: bool) -> list[Transfer]:
        """Begins to write ``source`` from byte ``begin`` on, with new checksums, or none unless it is ``summed``."""
        if not summed:
            self.sums_of(begin, begin + source.numel()).zero_()  # those of what was there before
        begun = [
            self._disk.write(
                self._files[span.file],
                source[span.begin - begin : span.end - begin],
                offset=span.offset,
                priority=Priority.WRITE_BACK,
                sums=self.sums_of(span.begin, span.end) if summed else None,
            )
            for span in self.stripes.transfers(begin, begin + source.numel(), PIECE_BYTES)
        ]
        self.writes += begun
        self._note("write", begun)
        return begun

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Blocks until transfers of this unit are done; raises what made one fail, with the unit's name."""
        failure = None
        for transfer in transfers:
            try:
                transfer.wait()
            except (DiskError, CorruptionError) as error:
                failure = failure or error
        if failure is not None:
            if not failure.message.startswith(self.name):
                failure.message = f"{self.name}: {failure.message}"
            raise failure

    def settled(self) -> bool:
        """Whether nothing is on its way into the file; raises what made a write fail."""
        done = [transfer for transfer in self.writes if transfer.done()]
        self.wait(done)
        self.writes = [transfer for transfer in self.writes if transfer not in done]
        return not self.writes

    def settle(self) -> None:
        """Blocks until what is on its way into the file has arrived; raises what made it fail."""
        self.wait(list(self.writes))

    def pieces(self, *, verify: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Reads all that is used; yields (begin, bytes) while what follows is read.

        Compares the checksums, and raises CorruptionError; without ``verify`` it sets them.
        """
        size = min(_READ_AT_ONCE, self.used_bytes)
        targets = [HostBuffer(size, private=True).flat for _ in range(2)]
        waiting: list[tuple[int, Tensor, list[Transfer]]] = []
        for number, begin in enumerate([*range(0, self.used_bytes, _READ_AT_ONCE), None]):
            if begin is not None:
                target = targets[number % 2][: self.used_bytes - begin]
                waiting.append((begin, target, self.read(target, begin, Priority.FETCH, verify=verify)))
            if waiting and (begin is None or number):
                before, target, transfers = waiting.pop(0)
                self.wait(transfers)
                yield before, target

    def verify(self) -> None:
        """Reads all of it and compares the checksums. Raises CorruptionError."""
        for _ in self.pieces():
            pass

    def replaced(self) -> list[Path]:
        """Returns at which of its paths there is not the file any more that is open."""
        return [path for path, opened in zip(self.paths, self._opened, strict=True) if not is_at(path, opened)]

    def entry(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> UnitFileEntry:
        """Syncs the files and returns what a checkpoint's manifest says of them and of the ``tensors`` in them.

        ``names`` are those of the files there. Reads all of it, and compares the checksums; those that were not known
        are from now on. Raises DiskError and CorruptionError.
        """
        self.settle()
        self.kept_bytes = self.used_bytes
        try:
            for file in self._files:
                file.sync()
        except DiskError as error:
            error.message = f"{self.name}: {error.message}"
            raise
        offsets = {name: offset for name, tensor in tensors.items() if (offset := self.find(tensor)) is not None}
        crcs = dict.fromkeys(offsets, 0)
        for begin, piece in self.pieces():
            end = begin + len(piece)
            if not (sums := self.sums_of(begin, end)).all():
                checksums(piece, sums)
            for name, offset in offsets.items():
                first, last = max(begin, offset), min(end, offset + tensors[name].nbytes)
                if first < last:
                    crcs[name] = crc32c(piece[first - begin : last - begin], crcs[name])
        return UnitFileEntry(
            unit=self.name,
            parts=list(names),
            stripe_bytes=self.stripes.stripe_bytes,
            length_bytes=self.capacity_bytes,
            taken_bytes=self.used_bytes,
            pages_crc32c=self._sum_of_sums(),
            tensors={
                name: PlacedEntry(
                    dtype=name_of(tensors[name].dtype),
                    shape=list(tensors[name].shape),
                    crc32c=crcs[name],
                    offset=offset,
                )
                for name, offset in offsets.items()
            },
        )

    def take_sums(self, entry: UnitFileEntry, look: Callable[[str, Tensor], None]) -> bool:
        """Reads all that was kept and sets the checksums; returns whether it is what ``entry`` says.

        ``look`` is called with each tensor's name and bytes, part by part.
        """
        for begin, piece in self.pieces(verify=False):
            for name, tensor in entry.tensors.items():
                first, last = max(begin, tensor.offset), min(begin + len(piece), tensor.offset + tensor.length_bytes)
                if first < last:
                    look(name, piece[first - begin : last - begin])
        return self._sum_of_sums() == entry.pages_crc32c

    def _sum_of_sums(self) -> int:
        return crc32c(self.sums_of(0, self.used_bytes))

    def _note(self, what: str, transfers: Iterable[Transfer]) -> None:
        if (timeline := self._device.timeline) is not None:
            for transfer in transfers:
                timeline.add_later(f"disk {what}s", f"{what} {self.name}", transfer.times)

    def _create(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
        self._files = [self._open(path, create=True) for path in self.paths]
        for number, path in enumerate(self.paths):
            length = self.stripes.share(number, self.capacity_bytes)
            try:
                os.truncate(path, length)
            except OSError as error:  # a limit, or a file system whose files are short
                for created in self.paths:
                    created.unlink()
                raise StoreError(
                    f"a store must be able to hold a layer in a file (got {error.strerror} for {format_bytes(length)} "
                    f"at {path}); raise the limit of file sizes (ulimit -f), or pass a directory on a file system that "
                    "holds larger files"
                ) from error

    def _open(self, path: Path, *, create: bool = False) -> DiskFile:
        file = self._disk.open(path, create=create)
        if file.alignment > PAGE_BYTES:
            raise StoreError(
                f"a disk must take direct transfers in blocks of {PAGE_BYTES} bytes or fewer (that of {path} wants "
                f"{file.alignment}); use a directory on another file system"
            )
        return file
