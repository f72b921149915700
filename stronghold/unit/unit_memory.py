"""What a unit asks of the store that it is placed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from stronghold.device import Buffer, Device

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit


Kind = Literal["weights", "remainders", "moments"]
"""What a unit has memory for."""


class Memory(Protocol):
    """Who gives a unit its memory: the store."""

    device: Device

    def allocate(self, unit: Unit, length_bytes: int, kind: Kind) -> Buffer:
        """Allocates memory of a unit, all zero."""

    def check_memory(
        self, *, host_bytes: int, device_bytes: int, disk_bytes: Mapping[Unit, int] | None = None, what: str
    ) -> None:
        """Raises BudgetError where ``what`` does not fit the budgets beside what is allocated already.

        ``disk_bytes`` are by unit, each of which has files of its own.
        Raises MemoryError where the machine can never have it, StoreError where the disk does not; warns where the
        host's memory is not free now.
        """

    def mark_dirty(self, unit: Unit) -> None:
        """Called before the user may write a unit's memory, then and until the next update."""

    def written(self, unit: Unit) -> tuple[list[int], bool]:
        """Returns which parameters, by number, were written on disk by a way that nothing tells of; asked once.

        And whether others may have been, of which it cannot be told.
        """

    def drop(self, unit: Unit) -> None:
        """Takes what was looked at of a unit on disk out of the resident set."""
