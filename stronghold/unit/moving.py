"""Moves a unit from the host to the device, where it stays from then on."""

from __future__ import annotations

from stronghold.unit.masters import Masters
from stronghold.unit.unit import Unit


def may_move(unit: Unit) -> bool:
    """Whether each trained weight in 16 bits has its remainder and no frozen one has, as when a unit is placed anew."""
    return unit.master_places() == sorted(unit.masters.remainders)


def keep_on_device(unit: Unit) -> None:
    """Makes a unit on the host resident: copies its weights and their remainders to memory of its own on the device.

    Nothing of it may be under way. The parameters look at the old weights until they are given the new ones. Where the
    device has no room, it raises what says so, and the unit is as it was.
    """
    buffer, weights, masters = unit.buffer, unit.weight, unit.masters
    unit.resident, unit.masters = True, Masters()
    try:
        unit.make_room(unit.memory)
    except BaseException:
        unit.resident, unit.buffer, unit.weight, unit.masters = False, buffer, weights, masters
        raise
    for there, weight in zip(unit.weight, weights, strict=True):
        there.copy_(weight)
    for index, remainder in masters.remainders.items():
        unit.masters.remainders[index].copy_(remainder)
    unit.gradients.close()
