"""What the optimizer, the parameters and the engine may ask of one another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from stronghold.device import Buffer, Device, Event
from stronghold.layout import Part
from stronghold.native import Segment

if TYPE_CHECKING:
    from stronghold.unit.gradient import HostGrad
    from stronghold.unit.unit import Unit


Kind = Literal["weights", "remainders", "moments"]
"""What a unit has memory for."""


class Memory(Protocol):
    """Who gives a unit its memory: the store."""

    def allocate(self, unit: Unit, length_bytes: int, kind: Kind) -> Buffer:
        """Allocates memory of a unit, all zero."""

    def mark_dirty(self, unit: Unit) -> None:
        """Called before the user may write a unit's memory, then and until the next update."""

    def written(self, unit: Unit) -> tuple[list[int], bool]:
        """Returns which parameters, by number, were written on disk by a way that nothing tells of; asked once.

        And whether others may have been, of which it cannot be told.
        """

    def drop(self, unit: Unit) -> None:
        """Takes what was looked at of a unit on disk out of the resident set."""


class Owner(Protocol):
    """What an optimizer and a parameter may ask of the engine they belong to."""

    device: Device
    units: Sequence[Unit]
    sums_gradients: bool
    """Whether a step has several backward passes, under in_backward too: the sums need memory."""
    masters_kept: bool
    """Whether the masters are kept beside a state dictionary, which has none, or the user was told that it has none."""

    def agree(self, found: Mapping[Unit, Collection[int]]) -> None:
        """Raises ParallelError where replicas have not ``found`` gradients at the same indices of the same units."""

    def update_threads(self) -> int:
        """Returns how many cores an update may use: all that the process may, but one for the thread that computes."""

    def turn(self) -> AbstractContextManager[None]:
        """Returns a block in which no other thread computes with the model."""

    def close_backward(self) -> None:
        """Brings down and publishes the gradients of a backward pass that was left unfinished."""

    def adopt(self, optimizer: Updater) -> None:
        """Makes ``optimizer`` the one that updates this model; raises where it has one already."""

    def collect(self, unit: Unit, gradients: dict[int, Tensor]) -> dict[int, HostGrad]:
        """Returns ``gradients`` (by index) where the unit is updated, complete, with their squares on the host."""

    def take_writes(self, unit: Unit) -> bool:
        """Brings the host's memory of ``unit`` up to what the user wrote into its parameters, if anything."""

    def prepare(self, unit: Unit, work: Work, moved_bytes: int) -> Prepared:
        """Makes ``work``, the update of ``unit``, which moves ``moved_bytes``, ready; nothing is written.

        Raises what refuses it. Updates are submitted in the order in which they were prepared.
        """

    def sum_squares(self, found: Mapping[Unit, Mapping[int, HostGrad]], *, finite: bool) -> float:
        """Returns the sum of squares of all gradients, ``found`` here and by other processes of the same model.

        Not a number where it is known of some, here or there, that they are not ``finite``.
        """

    def changed(self, units: Sequence[Unit]) -> None:
        """Called when updates of ``units`` have been submitted; their copies on the device are stale from then on."""

    def take_found_inf(self) -> bool:
        """Whether a gradient of the backward pass was not finite, from where on no layer was updated; forgets it."""

    def check_memory(self, *, host_bytes: int, device_bytes: int, disk_bytes: int = 0, what: str) -> None:
        """Raises BudgetError where ``what`` does not fit the budgets beside what is allocated already.

        Raises MemoryError where the machine can never have it, StoreError where the disk does not; warns where the
        host's memory is not free now.
        """

    def step_done(self) -> None:
        """Called when the optimizer has taken its step."""

    def wait_updates(self) -> None:
        """Blocks the host until every update under way is complete: the user reads or writes what they write."""

    def wait_on_host(self, unit: Unit) -> None:
        """Blocks the host until the update of ``unit`` that is under way is complete, whatever the device waits for."""

    def wait_updated(self, unit: Unit) -> None:
        """Waits for the update of ``unit`` that is under way: the user uses its weights or gradients."""


class Prepared(Protocol):
    """An update that nothing refuses any more."""

    def submit(self, after: Event | None) -> Event | None:
        """Submits it behind ``after``.

        Returns the event after which the weights may be used again, or None where that is the computation's order.
        """

    def cancel(self) -> None:
        """Gives it up; nothing has changed."""


class Work(Protocol):
    """The update of one unit."""

    operands: Sequence[Sequence[Tensor]]
    """What it reads and writes of every parameter in turn, beside the gradient."""
    parts: Sequence[Part]
    """What of every parameter in turn is updated here."""

    def segments(self) -> list[Segment] | None:
        """Counts the step and returns what is to be updated; None where nothing is, for gradients that are not finite.

        Called in the update's turn. They are whole parameters, of which ``parts`` are to be updated.
        """

    def kernel(self, segments: list[Segment]) -> None:
        """Updates some of the segments, or parts of them."""

    def done(self) -> None:
        """Called when all segments are updated."""


class Updater(Protocol):
    """What the engine may ask of the optimizer."""

    in_backward: bool
    threads: int
    """The cores that work on the host's memory may use."""

    def updates(self, unit: Unit, index: int) -> bool:
        """Whether a parameter is one of those that the optimizer updates."""

    def update_now(self, unit: Unit, gradients: dict[int, HostGrad], ready: Event | None) -> Event | None:
        """Submits the update of ``unit`` behind ``ready``; returns its event, or None where it is done in order."""

    def wait(self) -> None:
        """Blocks until every update is complete."""

    def forget(self) -> None:
        """Gives the states back: the model was closed."""
