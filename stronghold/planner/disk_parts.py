"""What of each unit is on disk: all of it, or what the host's memory cannot hold beside the engine's buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from stronghold.planner.model_bytes import ModelBytes, Part, UnitBytes
from stronghold.planner.step_bytes import Buffers, update_bytes

WEIGHTS: frozenset[Part] = frozenset(("weights",))
STATES: frozenset[Part] = frozenset(("remainders", "moments"))
_NOTHING: frozenset[Part] = frozenset()


class Known(NamedTuple):
    """What is known of the optimizer when units are placed; of its moments' format None, where that is not."""

    in_backward: bool = False
    states: str | None = None


UNKNOWN = Known()


def parts_on_disk(
    model: ModelBytes,
    order: Sequence[int],
    resident: Collection[int],
    buffers: Buffers,
    host_memory: int | None,
    *,
    processes: int = 1,
    known: Known = UNKNOWN,
) -> dict[int, frozenset[Part]]:
    """Returns what of each unit is on disk: all but the root parameters' weights, or what ``host_memory`` cannot hold.

    Weights are the first to stay in host memory, as a step reads them there three times and writes them once; then the
    remainders and moments, unit by unit in ``order``, which an update reads and writes once: of a layer whose weights
    stay. Gradients come first of all, where they fit; those of layers that are updated in the backward pass are used up
    there, and moments count in the largest format, where nothing else is ``known`` of the optimizer. The ``processes``
    of a machine have all of it in common, each a part.
    """
    units = model.units
    on_host = [number for number in order if number not in resident]
    everything = {number: STATES if units[number].is_root else STATES | WEIGHTS for number in on_host}
    if host_memory is None:
        return everything

    def ring(on_disk: Mapping[int, frozenset[Part]]) -> int:
        kinds = {(model.kind_of(number), on_disk[number]): units[number] for number in on_host}
        updates = (update_bytes(unit, key[1], one) for key, unit in kinds.items() for one in _formats(unit, known))
        return buffers.ring(max(updates, default=0))

    # The ring takes of the room, by what is on disk in the end: nothing where all fits, less where all weights do.
    found = everything
    for wanted in (dict.fromkeys(on_host, _NOTHING), dict.fromkeys(on_host, STATES), everything):
        room = host_memory - ring(wanted)
        found = _kept_in(model, everything, buffers, room, processes, known)
        if host_memory - ring(found) >= room:
            break
    return found


def _kept_in(
    model: ModelBytes,
    everything: Mapping[int, frozenset[Part]],
    buffers: Buffers,
    host_memory: int,
    processes: int,
    known: Known,
) -> dict[int, frozenset[Part]]:
    """Returns what of ``everything`` is on disk where the host has so much beside the ring."""
    units, found = model.units, dict(everything)
    layers = [number for number in found if not units[number].is_root]
    staged = buffers.gradient_slots * max((units[number].gradients for number in layers), default=0)
    room = processes * (host_memory - staged)
    copied = [number for number in found if units[number].is_root and units[number].is_copied]
    room -= sum(units[number].gradients for number in [*copied, *([] if known.in_backward else layers)])
    room -= sum((processes if units[number].is_root else 1) * units[number].sums for number in found)
    room -= sum(units[number].weights for number in found if units[number].is_root)
    if sum(units[number].weights for number in layers) > room and not model.is_host:  # some weights will be on disk
        room -= processes * buffers.disk_buffers * max((units[number].slot for number in layers), default=0)
    for number in layers:
        if units[number].weights <= room:
            found[number] -= WEIGHTS
            room -= units[number].weights
    for number, unit in ((number, units[number]) for number in found):
        size = unit.remainders + max((unit.moments[one] for one in _formats(unit, known)), default=0)
        if "weights" not in found[number] and size <= room:
            found[number] -= STATES
            room -= size
    return found


def _formats(unit: UnitBytes, known: Known) -> Iterable[str]:
    """Returns those in which the unit's moments may be."""
    return unit.moments if known.states is None or known.states not in unit.moments else (known.states,)
