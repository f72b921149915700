"""How many bytes of each memory a model takes under given settings: the arithmetic of budgets, reports and plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from stronghold.layout import PAGE_BYTES, round_up

Part = Literal["weights", "remainders", "moments"]
WEIGHTS: frozenset[Part] = frozenset(("weights",))
MUON = "muon"
"""The name of Muon's momentum, with AdamW's moments of what it does not update, beside the formats of AdamW's."""
STATES: frozenset[Part] = frozenset(("remainders", "moments"))


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """What the parts of one unit take, wherever they are.

    ``slot`` is what its weights take in a slot of the window, ``gradients`` what those of its trained parameters take
    with their squares, and ``gradient_slot`` the same on the device on their way down. ``moments`` are the optimizer's
    by the name of their format: of Muon's, AdamW's ``moments_apart`` are in a buffer of their own. ``directions`` are
    what Muon's of the unit's matrices take of the host while it is updated. ``on_device`` is what a root parameter that
    is not resident takes there: its copy, and its gradient until that is on the host; ``root_gradient`` what autograd
    holds of that. ``is_copied`` tells that its copy is apart from its host memory.
    """

    weights: int
    trained_elements: int = 0
    slot: int = 0
    remainders: int = 0
    gradients: int = 0
    gradient_slot: int = 0
    moments: Mapping[str, int] = field(default_factory=dict)
    moments_apart: int = 0
    directions: int = 0
    is_root: bool = False
    is_copied: bool = False
    on_device: int = 0
    root_gradient: int = 0

    @property
    def trained(self) -> bool:
        return self.gradients > 0

    def resident(self, states: str = "fp32") -> int:
        """Returns what the unit takes on the device if it is resident, its gradients and moments with it."""
        return self.weights + self.remainders + self.gradients + self.moments.get(states, 0)

    def part(self, name: Part, states: str) -> int:
        return (
            self.moments.get(states, 0) if name == "moments" else self.weights if name == "weights" else self.remainders
        )


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What the engine has beside the units: gradient slots on the device and staging buffers on the host, so many each.

    Units on disk are updated through ``ring_bytes`` of host memory, and layers go from there through ``disk_buffers``
    to a device with memory of its own.
    """

    gradient_slots: int
    disk_buffers: int
    ring_bytes: int


class Streamed(NamedTuple):
    """Of a model of which some units are resident: how many ``layers`` are not, and the longest ``slot`` of one.

    ``root`` is what root parameters take on the device that are not, ``resident`` what those units do that are, with
    moments in fp32.
    """

    layers: int
    slot: int
    gradient_slot: int
    root: int
    resident: int


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What a model is made of: its layers and root parameters, and its buffers, which are on the device."""

    layers: Sequence[UnitBytes]
    root: Sequence[UnitBytes] = ()
    buffers: int = 0
    is_host: bool = False
    """Whether the device's memory is the host's: nothing is copied apart, and layers are read into their slots."""

    @cached_property
    def units(self) -> list[UnitBytes]:
        return [*self.layers, *self.root]

    @cached_property
    def _streamed(self) -> dict[frozenset[int], Streamed]:
        return {}

    def streamed(self, resident: Collection[int]) -> Streamed:
        """Returns what there is to know of the units that are not ``resident``, which a search asks again and again."""
        key = frozenset(resident)
        if key not in self._streamed:
            layers = [unit for number, unit in enumerate(self.layers) if number not in key]
            root = [unit for number, unit in enumerate(self.root, len(self.layers)) if number not in key]
            self._streamed[key] = Streamed(
                layers=len(layers),
                slot=max((unit.slot for unit in layers), default=0),
                gradient_slot=max((unit.gradient_slot for unit in layers), default=0),
                root=sum(unit.on_device for unit in root),
                resident=sum(self.units[number].resident() for number in key),
            )
        return self._streamed[key]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where units are: ``resident`` ones by number, layers first and behind them the root, with what is on disk."""

    window: int
    resident: frozenset[int] = frozenset()
    on_disk: Mapping[int, frozenset[Part]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a model takes between steps, by the names of its report.

    Activations, and ``root_gradients`` from a backward pass to the next ``zero_grad()``, come on top on the device.
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
        if held_on_device(model, window, {*layers, *trained[:count]}, buffers) <= limit:
            return trained[:count]
    return []


def parts_on_disk(
    model: ModelBytes,
    order: Sequence[int],
    resident: Collection[int],
    buffers: Buffers,
    host_memory: int | None,
    *,
    processes: int = 1,
) -> dict[int, frozenset[Part]]:
    """Returns what of each unit is on disk: all but the root parameters' weights, or what ``host_memory`` cannot hold.

    Weights are the first to stay in host memory, as a step reads them there three times and writes them once; then the
    remainders and moments, unit by unit in ``order``, which an update reads and writes once. Gradients come first of
    all, as if none were used up in the backward pass, where they fit. The ``processes`` of a machine have all of it in
    common, each a part.
    """
    units = model.units
    on_host = [number for number in order if number not in resident]
    found = {number: STATES if units[number].is_root else STATES | WEIGHTS for number in on_host}
    if host_memory is None:
        return found
    layers = [number for number in on_host if not units[number].is_root]
    staged = buffers.gradient_slots * max((units[number].gradients for number in layers), default=0)
    room = processes * (host_memory - buffers.ring_bytes - staged)
    room -= sum(units[number].gradients for number in on_host)
    room -= sum(units[number].weights for number in on_host if units[number].is_root)
    if sum(units[number].weights for number in layers) > room and not model.is_host:  # some weights will be on disk
        room -= processes * buffers.disk_buffers * max((units[number].slot for number in layers), default=0)
    for number in layers:
        if units[number].weights <= room:
            found[number] -= WEIGHTS
            room -= units[number].weights
    for number in on_host:
        size = units[number].remainders + max(units[number].moments.values(), default=0)
        if size <= room:
            found[number] -= STATES
            room -= size
    return found


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

    Of what ``replicas`` on one machine have in common each counts its part: units on the host and on disk, and the
    gradients of layers there.
    """
    slots, gradients, root = device_bytes(model, placed.window, placed.resident, buffers)
    on_host = [(n, unit) for n, unit in enumerate(model.units) if n not in placed.resident]
    in_memory: dict[Part, int] = dict.fromkeys(("weights", "remainders", "moments"), 0)
    on_disk, through_ring, longest_on_disk = 0, False, 0
    for number, unit in on_host:
        there = placed.on_disk.get(number, frozenset())
        for part in in_memory:
            size = unit.part(part, states)
            if part in there:
                apart = unit.moments_apart if (part, states) == ("moments", MUON) else 0
                on_disk += round_up(size - apart, PAGE_BYTES) + round_up(apart, PAGE_BYTES)
            else:
                in_memory[part] += size
        through_ring |= "moments" in there and unit.trained
        if "weights" in there:
            longest_on_disk = max(longest_on_disk, unit.slot)
    kept = [unit for _, unit in on_host if (unit.is_copied if unit.is_root else not in_backward)]
    streamed = [unit.gradients for _, unit in on_host if not unit.is_root]
    staging = buffers.gradient_slots * max(streamed, default=0)
    if states == MUON:
        staging += max((unit.directions for _, unit in on_host), default=0)
    if not model.is_host:
        staging += buffers.disk_buffers * longest_on_disk
    return StepBytes(
        slots=slots,
        gradients=gradients,
        root=root,
        resident=sum(model.units[number].resident(states) for number in placed.resident),
        root_gradients=sum(unit.root_gradient for unit in model.root),
        pinned=(in_memory["weights"] + sum(unit.gradients for unit in kept if not unit.is_root)) // replicas
        + sum(unit.gradients for unit in kept if unit.is_root)
        + staging,
        pageable=(in_memory["remainders"] + in_memory["moments"]) // replicas
        + (buffers.ring_bytes if through_ring else 0),
        disk=on_disk // replicas,
    )
