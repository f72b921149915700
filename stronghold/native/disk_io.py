"""Files read and written past the page cache by a pool of threads, while the caller goes on; ``csrc/disk.h``.

    disk = Disk()
    file = disk.open("/mnt/nvme/run1/layers", create=True)
    file.reserve(layers * layer_bytes)
    written = disk.write(file, tensor, offset=layer * layer_bytes)
    ...
    written.wait()

A transfer owns its memory from the call to its end: nobody may read what is being read, or change what is being
written. Nothing orders two transfers of the same bytes: wait for the first. What is read and written is checked, and an
error is raised by ``wait``; a caller that does not wait learns of it from :meth:`Disk.drain`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

import torch
from torch import Tensor

from stronghold.errors import CorruptionError, DiskError
from stronghold.native.disk_errors import translated, warn_of_buffering
from stronghold.native.extension import _C
from stronghold.native.faults import Fault, system_of

PIECE_BYTES = _C.PIECE_BYTES
"""Bytes of a file that one thread transfers at a time, unless a disk is told otherwise."""
DISK_THREADS = _C.DISK_THREADS
"""Threads that transfer, unless a disk is told otherwise."""
SUM_BYTES = 4096
"""Bytes that share a checksum."""

_SUMS = tuple(getattr(torch, name) for name in ("int32", "uint32") if hasattr(torch, name))


class Priority(IntEnum):
    """What goes first. Any other integer will do, too: the lower, the sooner."""

    FETCH = 0  # the computation waits for it
    READ_AHEAD = 1  # it will wait next
    PREFETCH = 2
    WRITE_BACK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskCounters:
    """What a disk's threads have done so far.

    Bytes are those that the system has moved, with the padding of last blocks and what was done twice after a short
    transfer: what wears a device. ``busy_s`` is how long at least one piece was under way.
    """

    read_bytes: int
    written_bytes: int
    busy_s: float


class DiskFile:
    """An open file; :meth:`Disk.open` makes them.

    ``direct`` is False where the file system refuses direct I/O (older kernels' tmpfs does);
    transfers then go through the page cache,
    and a BufferedDiskWarning says so once for each file system. ``alignment``, 4096 or a multiple of it, is what
    offsets have to be multiples of. Memory at a multiple of ``memory_alignment`` is transferred without a copy.

    ``create`` makes the file if it is absent; what it holds stays. Raises DiskError where it cannot be opened. It is
    closed when nobody refers to it and its last transfer has ended.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        create: bool = False,
        system: _C.Faults | None = None,
    ) -> None:
        self.path, self.read_only = os.fspath(path), read_only
        try:
            self._native = _C.DiskFile(os.fsencode(self.path), read_only, create, system)
        except _C.DiskError as error:
            raise translated(error) from None
        self.direct, self.alignment = self._native.direct, self._native.alignment
        self.memory_alignment = self._native.memory_alignment
        if not self.direct:
            warn_of_buffering(self.path)

    @property
    def size_bytes(self) -> int:
        """The file's length; transfers make it a multiple of ``alignment``."""
        return self._native.size()

    def reserve(self, length_bytes: int) -> bool:
        """Makes the file at least so long, and takes the space for it from the file system now, not while training.

        Returns False where the file system cannot promise space: only the length was set. Raises DiskError where there
        is too little, with the bytes that are missing; the file is as long as it was.
        """
        if length_bytes < 0:
            raise ValueError(f"length_bytes must be 0 or more (got {length_bytes}); pass the bytes that the file needs")
        try:
            return self._native.reserve(length_bytes)
        except _C.DiskError as error:
            raise translated(error) from None

    def sync(self) -> None:
        """Returns when what has been written would survive a loss of power. Raises DiskError if it might not."""
        try:
            self._native.sync()
        except _C.DiskError as error:
            raise translated(error) from None


class Transfer:
    """A read or a write under way; :class:`Disk` makes them. Any number of threads may wait for one."""

    def __init__(self, unsettled: dict[int, Transfer], *held: object) -> None:
        self._held: tuple[object, ...] | None = held  # memory, sums and file, until it is done
        self._native: _C.Transfer | None = None
        self._unsettled = unsettled

    def done(self) -> bool:
        """Whether it has ended, well or not: from now on its memory is left alone."""
        return self._native is not None and self._native.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns True when it is done, False if it is not after ``timeout_s``.

        Raises DiskError or CorruptionError if it failed, each time, and once no thread touches its memory any more.
        Ctrl-C ends the waiting, not the transfer.
        """
        assert self._native is not None
        try:
            if not self._native.wait(-1.0 if timeout_s is None else max(timeout_s, 0.0)):
                return False
        except _C.DiskError as error:
            if self._native.done():
                self._settle()
            raise translated(error) from None
        self._settle()
        return True

    def times(self) -> tuple[float, float]:
        """Returns when it began and ended with the system, in seconds of ``time.perf_counter``; 0 where it did not."""
        return (0.0, 0.0) if self._native is None else self._native.times()

    def _settle(self) -> None:
        self._held = None
        self._unsettled.pop(id(self), None)

    def _look(self) -> None:
        """Lets go of its memory if it is done, and of all of it if it did not fail: else its caller is to be told."""
        if self._native is None or not self._native.done():
            return
        self._held = None
        with contextlib.suppress(_C.DiskError):
            self._native.wait(0.0)
            self._settle()


class Disk:
    """A pool of threads that carry transfers out, those of the lowest ``priority`` first.

    A transfer is cut at every ``piece_bytes`` of its file, a multiple of 4096. A piece that is under way is not
    interrupted; all others give way to a more urgent transfer. A transfer from or to memory that lies askew, and the
    last block of one that is not a whole number of blocks, is copied through up to ``piece_bytes`` of each thread.

    In a child of fork it cannot be used, and says so with a DiskError; open another there. ``faults`` are for tests.
    """

    def __init__(
        self,
        *,
        threads: int = DISK_THREADS,
        piece_bytes: int = PIECE_BYTES,
        faults: Sequence[Fault] | None = None,
    ) -> None:
        if not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads must be an integer of 1 or more (got {threads!r}); leave it out for 4")
        if not isinstance(piece_bytes, int) or piece_bytes < 4096 or piece_bytes % 4096:
            raise ValueError(
                f"piece_bytes must be a multiple of 4096 (got {piece_bytes!r}); leave it out for {PIECE_BYTES}"
            )
        self.piece_bytes = piece_bytes
        self._system = None if faults is None else system_of(faults)
        self._native = _C.Disk(threads, piece_bytes, self._system)
        # By identity, until they are done and, if they failed, until their caller was told: their memory is in use.
        self._unsettled: dict[int, Transfer] = {}
        # Before the memory goes: when the disk does, and at the end of the program.
        self._finalizer = weakref.finalize(self, _close, self._native, self._unsettled)

    @property
    def threads(self) -> int:
        """How many there are: fewer than asked for where the system refused some."""
        return self._native.threads()

    def open(self, path: str | os.PathLike[str], *, read_only: bool = False, create: bool = False) -> DiskFile:
        """Returns the file at ``path``, which is closed when nobody uses it any more; see :class:`DiskFile`."""
        return DiskFile(path, read_only=read_only, create=create, system=self._system)

    def pieces(self, length_bytes: int) -> int:
        """Returns how many pieces a transfer of that length has."""
        return self._native.pieces(length_bytes)

    def read(
        self,
        file: DiskFile,
        memory: Tensor,
        *,
        offset: int = 0,
        priority: int = Priority.FETCH,
        sums: Tensor | None = None,
        verify: bool = False,
    ) -> Transfer:
        """Begins to fill ``memory``, a contiguous tensor on the CPU, from byte ``offset`` of ``file``.

        ``sums``, int32 or uint32, has one element for every SUM_BYTES: with ``verify`` the CRC-32C that they must have,
        or 0 where that is not known; else it is set to the one that they have.
        """
        if verify and sums is None:
            raise ValueError("verify needs the checksums to compare with (got sums=None); pass what the write has set")
        return self._submit(file, False, memory, offset, priority, sums, verify)

    def write(
        self,
        file: DiskFile,
        memory: Tensor,
        *,
        offset: int = 0,
        priority: int = Priority.WRITE_BACK,
        sums: Tensor | None = None,
    ) -> Transfer:
        """Begins to write ``memory``, a contiguous tensor on the CPU, to ``file`` from byte ``offset`` on.

        Zeros follow up to the end of the last block. ``sums``, int32 or uint32, one element for every SUM_BYTES, is set
        to their CRC-32C. It is on the device after the transfer and :meth:`DiskFile.sync`.
        """
        if file.read_only:
            raise ValueError(f"a file opened read-only cannot be written ({file.path!r}); open it without read_only")
        return self._submit(file, True, memory, offset, priority, sums, False)

    def _submit(
        self, file: DiskFile, write: bool, memory: Tensor, offset: int, priority: int, sums: Tensor | None, verify: bool
    ) -> Transfer:
        address, length = _memory("memory", memory), memory.nbytes
        if offset < 0 or offset % file.alignment:
            raise ValueError(
                f"offset must be a multiple of the file's alignment, {file.alignment} (got {offset} in {file.path!r}); "
                "begin each tensor's place in the file at such a multiple"
            )
        sums_address = 0
        if sums is not None:
            sums_address = _memory("sums", _fitting(sums, length))
        for before in list(self._unsettled.values()):
            before._look()
        # Known before it begins: an interrupt right behind its beginning must not free its memory.
        transfer = Transfer(self._unsettled, memory, sums, file)
        self._unsettled[id(transfer)] = transfer
        try:
            transfer._native = self._native.submit(
                file._native, write, address, offset, length, int(priority), sums_address, verify
            )
        except _C.DiskError as error:
            transfer._settle()
            raise translated(error) from None
        except ValueError:
            transfer._settle()
            raise
        return transfer

    def drain(self) -> None:
        """Returns when every transfer is done.

        Raises the first error that no ``wait`` has raised, once all are done.
        """
        first: Exception | None = None
        for transfer in list(self._unsettled.values()):
            try:
                if transfer._native is not None:
                    transfer.wait()
            except (DiskError, CorruptionError) as error:
                first = first or error
        if first is not None:
            raise first

    def counters(self) -> DiskCounters:
        read_bytes, written_bytes, busy_s = self._native.counters()
        return DiskCounters(read_bytes=read_bytes, written_bytes=written_bytes, busy_s=busy_s)

    def calls(self) -> list[tuple[str, str, int, int]]:
        """Returns kind, path, offset and bytes of every system call so far. Only a disk with ``faults`` counts them."""
        return [] if self._system is None else self._system.calls()

    def close(self) -> None:
        """Ends the threads after the pieces under way. Transfers that were not done fail: drain first.

        Happens by itself when nobody refers to the disk, and at the end of the program.
        """
        self._finalizer()

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def checksums(memory: Tensor, sums: Tensor) -> None:
    """Sets ``sums`` to what a transfer of ``memory`` would set them to."""
    _C.checksums(_memory("memory", memory), memory.nbytes, _memory("sums", _fitting(sums, memory.nbytes)))


def crc32c(memory: Tensor, crc: int = 0) -> int:
    """Returns the CRC-32C of a contiguous CPU tensor's bytes; with ``crc``, of these behind the bytes it stands for."""
    return _C.crc32c(_memory("memory", memory), memory.nbytes, crc)


def _fitting(sums: Tensor, length: int) -> Tensor:
    if sums.dtype not in _SUMS or sums.numel() != -(-length // SUM_BYTES):
        raise ValueError(
            f"sums must be int32 or uint32 and hold {-(-length // SUM_BYTES)} elements, one for every {SUM_BYTES} "
            f"bytes of {length} (got {sums.dtype}, {sums.numel()}); pass such a tensor"
        )
    return sums


def _close(native: _C.Disk, unsettled: dict[int, Transfer]) -> None:
    native.close()
    unsettled.clear()


def _memory(name: str, tensor: Tensor) -> int:
    """Returns where the tensor's bytes are. Raises ValueError where they are not one run of the host's memory."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU (got {tensor.device}); copy it to the host first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous (got shape {tuple(tensor.shape)} with strides {tensor.stride()}); "
            "pass the storage that it views"
        )
    return tensor.data_ptr()
