"""What root parameters take that several processes have, each a copy: an embedding that is the head as well."""

from __future__ import annotations

from collections.abc import Iterable

from stronghold.planner.machine_share import all_reduce_s
from stronghold.planner.model_bytes import UnitBytes
from stronghold.planner.step_costs import Machine


def summing_bytes(root: Iterable[UnitBytes]) -> int:
    """Returns what it takes at the most to add up the gradients of one that is shared, behind a step's passes.

    They are added up in fp32, beside the process's own and, in a smaller dtype, the one that is made of the sum.
    """
    shared = (unit for unit in root if unit.is_shared and unit.trained)
    return max((4 * unit.trained_elements + (unit.remainders and unit.weights) for unit in shared), default=0)


def updated_on_host_s(
    root: Iterable[UnitBytes], machine: Machine, replicas: int, *, message_s: float, bytes_per_s: float
) -> float:
    """Returns what updates of shared ones take on an accelerator's host, the copies there and back with them.

    The first pass waits for them, and all other updates are behind. Gradients become the mean of ``replicas`` on the
    device, and each copies all of them and updates its part. ``machine`` is what a process has of it, apart from what
    replicas add to a layer's gradients.
    """
    taken_s = 0.0
    for unit in root:
        if not (unit.is_shared and unit.is_copied and unit.trained):
            continue
        if replicas > 1:
            taken_s += all_reduce_s(unit.gradients, replicas, message_s=message_s, bytes_per_s=bytes_per_s)
        taken_s += machine.down_s(unit.gradients) + machine.copy_s + unit.weights / machine.h2d_bytes_per_s
        taken_s += -(-unit.trained_elements // replicas) * machine.host_update_ns * 1e-9
    return taken_s
