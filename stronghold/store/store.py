"""What every store does."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from stronghold.device import Buffer, Device, Event, Stream
from stronghold.errors import BudgetError
from stronghold.layout import Part
from stronghold.native import DiskCounters
from stronghold.store.input_file import InputFile
from stronghold.store.limits import Budget
from stronghold.unit import Kind, Unit


class Piece(Protocol):
    """Elements of one parameter as an update's kernel takes them: a stronghold.native.Segment, or what is like one."""

    @property
    def elements(self) -> int: ...

    def part(self, begin: int, end: int) -> Any:
        """Returns the elements from ``begin`` to ``end``."""

    def mapped(self, of: Callable[[Tensor], Tensor]) -> Any:
        """Returns the piece with ``of`` applied to its tensors."""


Kernel = Callable[[list[Any]], None]
"""What updates such pieces, all those of one call; a parameter's are given in their order."""


class UpdateIO(Protocol):
    """Reads and writes what one update of a unit needs."""

    def begin(self) -> None:
        """Begins to read it; updates run in the order in which they were begun, or are given up."""

    def run(self, segments: Sequence[Piece], kernel: Kernel) -> None:
        """Calls ``kernel`` on its parts of ``segments``, in one piece or several, where it can read and write them."""

    def cancel(self) -> None:
        """Gives the update up, begun or not, where it has not run; nothing has changed. Called in the updates' turn."""


class Store(ABC):
    """Where units live: it allocates their memory, sends weights to the device and leads states through updates."""

    def __init__(self, device: Device, budget: Budget | None = None) -> None:
        self.device = device
        self._budget = budget
        self.streams: list[Stream] = []
        """Its own, beside the device's."""

    def take_in(self, unit: Unit) -> None:
        """Called with a unit that was not there from the beginning, before it is placed; it is in memory."""
        assert not unit.on_disk

    @abstractmethod
    def give_back(self, units: Sequence[Unit]) -> None:
        """Called when some of all ``units`` have been frozen: gives back what is there for updates alone."""

    def place(self, unit: Unit, values: Iterable[Tensor] | None = None) -> None:
        """Moves the parameters of ``unit`` into the store, with ``values`` if they have none of their own."""
        unit.place(self, values)

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Takes what was looked at of a unit out of the resident set, where it has a place beside memory."""

    @abstractmethod
    def written(self, unit: Unit) -> tuple[list[int], bool]:
        """Returns which parameters, by number, were written on disk by a way that nothing tells of; asked once.

        And whether others may have been, of which it cannot be told.
        """

    @property
    def disk_bytes(self) -> int:
        """What the store has on disk."""
        return 0

    @property
    def paths(self) -> list[Path]:
        """The directories it uses."""
        return []

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint in ``directory`` is one in place: that is where the store itself has its manifest."""
        return False

    def find(self, unit: Unit, tensor: Tensor) -> tuple[str, int] | None:
        """Returns the file in which a tensor of ``unit`` lies, as a checkpoint in place names it, and the byte there.

        None is for one that is not on disk.
        """
        return None

    def counters(self) -> DiskCounters:
        """Returns what it has read from disk and written there so far, past the page cache."""
        return DiskCounters(read_bytes=0, written_bytes=0, busy_s=0.0)

    def check_space(self, needed_bytes: Mapping[Unit, int], what: str) -> None:
        """Raises StoreError where the directories' file systems do not have the bytes left that each unit needs."""
        assert not any(needed_bytes.values())

    def check_place(self, units: Iterable[Unit]) -> None:
        """Raises StoreError where the disk has no room for what of ``units`` lies there when they are placed."""
        weights = {unit: unit.layout.total_bytes if unit.lives("weights") == "disk" else 0 for unit in units}
        needed = {
            unit: length + (unit.remainder_bytes() if unit.lives("remainders") == "disk" else 0)
            for unit, length in weights.items()
        }
        self.check_space(needed, "the model's weights")

    def missing_ring_bytes(self, needed_bytes: Mapping[Unit, int]) -> int:
        """Returns what the store takes of the host's memory to update units with so much more on disk, by unit."""
        return 0

    def check_memory(
        self, *, host_bytes: int, device_bytes: int, disk_bytes: Mapping[Unit, int] | None = None, what: str
    ) -> None:
        """Raises BudgetError where ``what`` does not fit the budgets beside what is allocated already.

        ``disk_bytes`` are of what is updated on disk, by unit; what the ring lacks for that counts too. Raises
        MemoryError where the machine can never have it, StoreError where the disk does not; warns where the host's
        memory is not free now.
        """
        needed = disk_bytes or {}
        if needed:
            self.check_space(needed, what)
        if self._budget is None:
            return
        try:
            ring = self.missing_ring_bytes(needed)
            self._budget.check(host_bytes=host_bytes + ring, device_bytes=device_bytes, what=what)
        except (BudgetError, MemoryError):
            gc.collect()  # a scheduler and its optimizer, which may have had it, refer to one another
            ring = self.missing_ring_bytes(needed)
            self._budget.check(host_bytes=host_bytes + ring, device_bytes=device_bytes, what=what)

    def check_inputs(self, *, host_bytes: int, what: str) -> None:
        """Raises BudgetError where the layers' inputs do not fit the budget; MemoryError where they never can."""
        if self._budget is not None:
            self._budget.check_inputs(host_bytes, what)

    def input_file(self) -> InputFile:
        """Returns a file for layers' inputs, of a store that is on disk."""
        raise AssertionError(f"{type(self).__name__} has no files: the settings refuse activations='disk' with it")

    @abstractmethod
    def allocate(self, unit: Unit, length_bytes: int, kind: Kind) -> Buffer:
        """Allocates memory of a unit."""

    @property
    def lookahead(self) -> int:
        """How many fetches ahead it wants to be told of."""
        return 0

    @abstractmethod
    def expect(self, units: Sequence[Unit]) -> None:
        """Called with the units of the next fetches, in their order, as far as the schedule foresees them."""

    @abstractmethod
    def changed(self, unit: Unit) -> None:
        """Called when a unit's weights have changed: what the store holds of them beside their memory is stale."""

    def start_over(self) -> None:  # noqa: B027
        """Called where fetches, or what was expected, may not have been given to the device in full."""

    def reading(self, unit: Unit) -> Event | None:
        """Returns the event after which the unit's memory may be written: until then it is being read."""
        return unit.fetched.event

    @abstractmethod
    def fetch(self, unit: Unit, target: Tensor) -> None:
        """Submits the copy of the unit's weights to the flat device buffer ``target``, on the fetch stream."""

    @abstractmethod
    def update_io(self, unit: Unit, operands: Sequence[Sequence[Tensor]], parts: Sequence[Part]) -> UpdateIO:
        """Prepares an update of ``unit`` that is about to be submitted.

        ``operands`` are what the update reads and writes of every segment in turn, beside its gradient, and ``parts``
        what of them is updated here, by the segment's number. Where an update needs a parameter twice, it has a segment
        for each time.
        """

    @abstractmethod
    def mark_dirty(self, unit: Unit) -> None:
        """Called before the user may write what lives in the store: its checksums mean nothing until an update."""

    @abstractmethod
    def verify(self) -> None:
        """Compares the checksums of everything on disk. Raises CorruptionError, which names file and unit."""

    @abstractmethod
    def close(self) -> None:
        """Removes from disk what is there, and lets others have the directory; the model cannot be used after it."""

    def written_back(self, unit: Unit, done: Event) -> Event:
        """Returns the event after which what an update of ``unit``, complete at ``done``, wrote is where it lives."""
        return done
