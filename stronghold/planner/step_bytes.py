"""How many bytes of each memory a model takes under given settings: the arithmetic of budgets, reports and plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from stronghold.layout import PAGE_BYTES, round_up
from stronghold.planner.model_bytes import ModelBytes, Part, UnitBytes

MUON = "muon"
"""The name of Muon's momentum, with AdamW's moments of what it does not update, beside the formats of AdamW's."""
_NONE: frozenset[Part] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What the engine has beside the units: gradient slots on the device and staging buffers on the host, so many each.

    Units on disk are updated through ``ring_slots`` of host memory, each of ``ring_slot_bytes`` at most, and layers go
    from there through ``disk_buffers`` to a device with memory of its own.
    """

    gradient_slots: int
    disk_buffers: int
    ring_slots: int
    ring_slot_bytes: int

    def ring(self, update_bytes: int) -> int:
        """Returns what the ring takes where the unit with the most on disk has ``update_bytes``."""
        return self.ring_slots * min(self.ring_slot_bytes, update_bytes)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where units are: ``resident`` ones by number, layers first and behind them the root, with what is on disk."""

    window: int
    resident: frozenset[int] = frozenset()
    on_disk: Mapping[int, frozenset[Part]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a model takes between steps, by the names of its report.

    Activations, and ``root_gradients`` from a backward pass to the next ``zero_grad()``, come on top on the device; and
    gradients of resident layers that are updated in the backward pass, each until its layer is; replicas' stay, for
    they become means in the optimizer's step. The root's are in the activations where a step has one pass.
    """

    slots: int
    gradients: int
    root: int
    resident: int
    root_gradients: int
    pinned: int
    """What is pinned on a device for which memory can be."""
    pageable: int
    disk: int

    @property
    def device(self) -> int:
        return self.slots + self.gradients + self.root + self.resident

    @property
    def host(self) -> int:
        return self.pinned + self.pageable


def spread(layers: int, resident: int) -> list[int]:
    """Returns which of ``layers`` stay on the device: the first, and the others evenly behind it.

    The first layer is updated last and needed first; and between two resident layers the link has their computation's
    time for the next one. ``spread(8, 3)`` is ``[0, 2, 5]``.
    """
    return [i * layers // resident for i in range(resident)]


def device_bytes(model: ModelBytes, window: int, resident: Collection[int], buffers: Buffers) -> tuple[int, int, int]:
    """Returns what (slots, gradient slots, root parameters and buffers) take there, beside what is resident."""
    streamed = model.streamed(resident)
    slots, gradients = min(window, streamed.layers) * streamed.slot, buffers.gradient_slots * streamed.gradient_slot
    return slots, gradients, model.buffers + streamed.root


def held_on_device(model: ModelBytes, window: int, resident: Collection[int], buffers: Buffers) -> int:
    """Returns what all of that takes there with what is resident, whose moments count in fp32."""
    return model.streamed(resident).resident + sum(device_bytes(model, window, resident, buffers))


def resident_root(
    model: ModelBytes,
    window: int,
    layers: Collection[int],
    buffers: Buffers,
    limit: int,
    not_these: Collection[int] = (),
) -> list[int]:
    """Returns the numbers of the root parameters that are updated on the device: the first trained ones that fit."""
    first = len(model.layers)
    trained = [n for n, unit in enumerate(model.root, first) if unit.trained and n not in not_these]
    for count in range(0 if model.is_host else len(trained), 0, -1):
        if held_on_device(model, window, model.joined(frozenset(layers), trained[:count]), buffers) <= limit:
            return trained[:count]
    return []


def update_bytes(unit: UnitBytes, there: Collection[Part], states: str) -> int:
    """Returns what a unit has on disk, in whole pages, if its moments are there and pass through the ring."""
    if "moments" not in there or not unit.trained:
        return 0
    return sum(_pages(unit, part, states) for part in there)


def _pages(unit: UnitBytes, part: Part, states: str) -> int:
    size, apart = unit.part(part, states), unit.moments_apart if (part, states) == ("moments", MUON) else 0
    return round_up(size - apart, PAGE_BYTES) + round_up(apart, PAGE_BYTES)


def step_bytes(
    model: ModelBytes,
    placed: Placed,
    buffers: Buffers,
    *,
    states: str = "fp32",
    in_backward: bool = False,
    replicas: int = 1,
) -> StepBytes:
    """Returns what ``model`` takes where ``placed`` says, with the optimizer's moments in the format ``states``.

    Of what ``replicas`` on one machine have in common each counts its part: units on the host and on disk, and their
    gradients there.
    """
    slots, gradients, root = device_bytes(model, placed.window, placed.resident, buffers)
    counted = model.counted(placed.resident)
    if placed.on_disk:
        apart_from = [(n, unit) for n, unit in enumerate(model.units) if n not in placed.resident]
        parts = [(unit, placed.on_disk.get(n, _NONE), 1) for n, unit in apart_from]
    else:
        parts = [(one.unit, _NONE, one.streamed) for one in counted if one.streamed]
    in_memory: dict[Part, int] = dict.fromkeys(("weights", "remainders", "moments"), 0)
    on_disk, longest_update, longest_on_disk = 0, 0, 0
    for unit, there, count in parts:
        for part in in_memory:
            if part in there:
                on_disk += count * _pages(unit, part, states)
            else:
                in_memory[part] += count * unit.part(part, states)
        longest_update = max(longest_update, update_bytes(unit, there, states))
        if "weights" in there:
            longest_on_disk = max(longest_on_disk, unit.slot)
    on_host = [one for one in counted if one.streamed]
    kept = [one for one in on_host if (one.unit.is_copied if one.unit.is_root else not in_backward)]
    gradients_kept = sum(one.streamed * one.unit.gradients for one in kept)
    # Of a root parameter each replica has its own; processes that share one add up the sums anew.
    own = [one for one in on_host if one.unit.is_root and not (one.unit.is_copied and one.unit.is_shared)]
    sums = sum(one.streamed * one.unit.sums for one in on_host if not one.unit.is_root)
    streamed = [one.unit.gradients for one in on_host if not one.unit.is_root]
    staging = buffers.gradient_slots * max(streamed, default=0)
    if states == MUON:
        staging += max((one.unit.directions for one in on_host), default=0)
    if not model.is_host:
        staging += buffers.disk_buffers * longest_on_disk
    return StepBytes(
        slots=slots,
        gradients=gradients,
        root=root,
        resident=sum(
            one.resident * one.unit.resident(states, in_backward=in_backward and replicas == 1)
            + one.streamed * one.unit.beside
            for one in counted
        ),
        root_gradients=sum(unit.root_gradient for unit in model.root),
        pinned=(in_memory["weights"] + gradients_kept) // replicas + staging,
        pageable=(in_memory["remainders"] + in_memory["moments"] + sums) // replicas
        + sum(one.streamed * one.unit.sums for one in own)
        + buffers.ring(longest_update),
        disk=on_disk // replicas,
    )


def written_bytes(
    model: ModelBytes, on_disk: Mapping[int, frozenset[Part]], *, states: str = "fp32", replicas: int = 1
) -> int:
    """Returns what a step writes to disk: whole pages of all of a unit's parts there, if its moments are among them.

    Of ``replicas`` each writes its part.
    """
    return sum(update_bytes(model.units[number], parts, states) for number, parts in on_disk.items()) // replicas


def sums_bytes(
    model: ModelBytes, resident: Collection[int], micro_batches: int, *, replicas: int = 1
) -> tuple[int, int]:
    """Returns what sums of micro-batches' gradients take beside these (on the host, on the device).

    Gradients in bf16 are added up in fp32: the other two bytes are as many as a master's remainder has. A root
    parameter's are where autograd has them, each replica's own; where the host updates it they come down with them,
    unless processes share it, which add up the sums anew.
    """
    layers, on_host, on_device = 0, 0, 0
    if micro_batches == 1:
        return 0, 0
    for number, unit in enumerate(model.units):
        if number in resident or unit.is_copied:
            on_device += unit.remainders
        if number in resident:
            continue
        if not unit.is_root:
            layers += unit.remainders
        elif not (unit.is_copied and unit.is_shared):
            on_host += unit.remainders
    return -(-layers // replicas) + on_host, on_device
