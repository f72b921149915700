"""Whether there is room for parts of units that are not allocated yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from stronghold.layout import PAGE_BYTES, lay_out, round_up
from stronghold.unit.unit_memory import Kind

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit

Need = tuple["Unit", Kind, int]
"""A part of a unit and the bytes that it takes where it lives."""


def missing_remainders(unit: Unit, indices: Iterable[int]) -> Need:
    """Returns the remainders that the parameters at ``indices`` have not got, and get when they are updated."""
    of_bf16 = [index for index in indices if unit.dtypes[index] != torch.float32]
    sizes = [2 * unit.counts[index] for index in of_bf16 if index not in unit.masters.remainders]
    return unit, "remainders", lay_out(sizes, unit.alignment).total_bytes


def check_room(needs: Iterable[Need], what: str, *, gradient_bytes: int = 0) -> None:
    """Raises BudgetError, MemoryError or StoreError where ``needs`` of one model's units, at least one, do not fit.

    ``gradient_bytes`` are asked of the host beside them; ``what`` is what the error says that all of it is for.
    """
    host_bytes, device_bytes, disk_bytes, memory = gradient_bytes, 0, dict["Unit", int](), None
    for unit, kind, length_bytes in needs:
        memory, where = unit.memory, unit.lives(kind)
        host_bytes += length_bytes * (where == "host")
        device_bytes += length_bytes * (where == "device")
        if where == "disk" and length_bytes:
            disk_bytes[unit] = disk_bytes.get(unit, 0) + round_up(length_bytes, PAGE_BYTES)
    assert memory is not None
    memory.check_memory(host_bytes=host_bytes, device_bytes=device_bytes, disk_bytes=disk_bytes, what=what)
