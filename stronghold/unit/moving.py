"""Moves a unit from the host to the device, where it stays from then on."""

from __future__ import annotations

from stronghold.unit.masters import Masters
from stronghold.unit.unit import Unit


def may_move(unit: Unit) -> bool:
    """Whether the weights and the remainders of what is trained are all that there is of a unit's masters."""
    return unit.master_places() == sorted(unit.masters.remainders)


def keep_on_device(unit: Unit) -> None:
    """Makes a unit on the host resident: its weights and remainders become others on the device, of the same bits.

    Nothing of it may be under way. The parameters look elsewhere until they are given the new weights. Where the device
    has no room, it raises what says so, and the unit is as it was.
    """
    buffer, weights, masters = unit.buffer, unit.weight, unit.masters
    values = (masters.value(i, w) if i in masters.remainders else w for i, w in enumerate(weights))
    unit.resident, unit.masters = True, Masters()
    try:
        unit.place(unit.memory, values)
    except BaseException:
        unit.resident, unit.buffer, unit.weight, unit.masters = False, buffer, weights, masters
        raise
    unit.gradients.release()
