"""What a planned model takes of each memory in a step, choice by choice: held, on top, and what is left for budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stronghold.engine.planning.kept_inputs import InputsOfLayers, KeptInputs
from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.engine.planning.most_alive import Alive, alive
from stronghold.planner.choices import Choice
from stronghold.planner.disk_parts import Known
from stronghold.planner.step_bytes import MUON, Placed, StepBytes, update_bytes

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation

HELD = "held device"
"""What of the device is held from step to step, as a place of its own."""


class ChosenBytes:
    """Answers for one model what a choice takes, within ``limits`` on a device of type ``device_type``.

    Layers that are recomputed have their inputs where ``activations`` says, as for ``offload``. A step adds up the
    gradients of so many batches, ``accumulate``; None stands for any number.
    """

    def __init__(
        self,
        memory: ModelMemory,
        computation: ModelComputation,
        limits: Limits,
        device_type: str,
        *,
        activations: str = "recompute",
        accumulate: int | None = 1,
    ) -> None:
        self._memory, self._computation, self._limits = memory, computation, limits
        self._device_type, self._accumulate = device_type, accumulate
        self._inputs = InputsOfLayers(computation, activations, memory.block_bytes)
        self._alive: dict[tuple[int | None, int], Alive] = {}
        self._activations: dict[tuple[Any, ...], int] = {}
        self._placed: dict[Choice, tuple[Placed, StepBytes, int]] = {}

    def activation_bytes(self, choice: Choice) -> int:
        """Returns the most that activations, and gradients of them, take on the device in a step.

        That is what comes on top of the gradients that are held, where all take the most together. In the first pass
        they are there as it goes on, and in others from its beginning, with a resident layer's new ones until they are
        added. With several batches in the limits, it is of so many times the batch.
        """
        one_pass, given_up = self._is_one_pass(choice), self._gives_up(choice)
        key = choice.micro_batch, choice.kept, choice.resident, one_pass, given_up, choice.store
        if key not in self._activations:
            sizes, alike = self._memory.of(choice), key[:2]
            if alike not in self._alive:
                self._alive[alike] = alive(self._computation, *alike)
            there = [(number, sizes.layers[number].gradients) for number in self._memory.spread(choice.resident)]
            held, stay = sum(unit.root_gradient for unit in sizes.root), one_pass and not given_up
            held += sum(taken_bytes for _, taken_bytes in there) if stay else 0
            most = self._alive[alike].most(there, stay=stay, batches=self._limits.batches)
            self._activations[key] = max(0, most - held)
        return self._activations[key]

    def _gives_up(self, choice: Choice) -> bool:
        """Whether resident layers' gradients are given up in the backward pass; replicas' stay to become means."""
        return choice.update == "in_backward" and self._memory.replicas == 1

    def _is_one_pass(self, choice: Choice) -> bool:
        """Whether a step's gradients are of one backward pass, as those of layers are that are updated in it."""
        return self._accumulate == 1 or choice.update == "in_backward"

    def passes(self, choice: Choice) -> int:
        """Returns how many passes a step has, one where that is not known."""
        return 1 if self._is_one_pass(choice) else self._accumulate or 1

    def inputs(self, choice: Choice) -> KeptInputs:
        """Returns what layers' inputs take that are not kept on the device."""
        return self._inputs.taken(choice.micro_batch)

    def placed(self, choice: Choice) -> tuple[Placed, StepBytes, int]:
        """Returns where units are, what they take, and what activations, updates and rounding take on top in a step."""
        if choice not in self._placed:
            inputs = self.inputs(choice)
            device, host = self.budgets(choice)
            update, states = self.known(choice)
            known = Known(update == "in_backward", states)
            placed = self._memory.placed(choice, device_memory=device, host_memory=host, known=known)
            taken = self._memory.taken(choice, placed)
            taken = replace(
                taken,
                root_gradients=0 if self._is_one_pass(choice) else taken.root_gradients,
                pinned=taken.pinned + inputs.host,
                disk=taken.disk + inputs.disk,
            )
            self._placed[choice] = placed, taken, self._on_top(choice, placed.resident)
        return self._placed[choice]

    def known(self, choice: Choice) -> tuple[str | None, str | None]:
        """Returns the update and the states that units on disk are placed for, None for what is not known then."""
        if not self._limits.fills_ram:
            return self._limits.update, self._limits.states
        return choice.update, None if choice.states == MUON else choice.states

    def hints(self, choice: Choice) -> dict[str, str]:
        """Returns what ``offload`` is to be told of the optimizer where it would place for another one."""
        named = zip(("update", "states"), self.known(choice), ("deferred", "fp32"), strict=True)
        return {name: value for name, value, taken in named if value not in (None, taken)}

    def _on_top(self, choice: Choice, resident: frozenset[int]) -> int:
        """Returns the most that activations and updates of resident units take together, and blocks beside their bytes.

        Updates in the backward pass run beside activations, but for those of root parameters that are used before the
        layers: their gradients come last.
        """
        beside, behind = frozenset[int](), resident
        if choice.update == "in_backward":
            beside, behind = resident - self._used_first, resident & self._used_first
        sums, adding = self._memory.adding_bytes(resident)
        activations = self.activation_bytes(choice) + adding + self._on_device_bytes(choice, beside)
        norm = self._memory.squares_bytes(behind)
        on_top = max(activations, norm + self._on_device_bytes(choice, behind))
        on_top += self._memory.iterations_bytes(resident)[0]  # which go on under the next forward pass
        return on_top + sums + self.inputs(choice).device + self._memory.rounding(choice, resident)

    @cached_property
    def _used_first(self) -> frozenset[int]:
        """The numbers of the root parameters that are used before the layers."""
        units, used_first = self._memory.units, self._computation.root.used_first
        root = enumerate(units.root, len(units.layers))
        return frozenset(n for n, (unit, _) in root if any(id(p) in used_first for p in unit.parameters))

    def _on_device_bytes(self, choice: Choice, resident: frozenset[int]) -> int:
        """Returns what updates of so many resident units take on the device while they run."""
        scratch = self._memory.scratch(choice, resident, self._device_type)
        _, iterations = self._memory.iterations_bytes(resident)
        if not iterations:
            return scratch
        return scratch + iterations + max(self._memory.muon[number].part_bytes for number in resident)

    def update_bytes(self, choice: Choice) -> int:
        """Returns what the report says of an update on the device: Muon's iterations."""
        return sum(self._memory.iterations_bytes(self.placed(choice)[0].resident))

    def budgets(self, choice: Choice) -> tuple[int | None, int | None]:
        """Returns what ``device_memory`` and ``host_memory`` are for ``offload``: what is left beside activations."""
        sizes, count = self._memory.of(choice), len(self._memory.units.layers)
        trained = [number for number, unit in enumerate(sizes.root, count) if unit.trained]  # these may all be resident
        most = sizes.joined(self._memory.spread(choice.resident), trained)
        inputs, beside = self.inputs(choice), self._on_top(choice, most)
        beside += 0 if self._is_one_pass(choice) else sum(unit.root_gradient for unit in sizes.root)
        device = None if self._limits.device is None else max(0, self._limits.device - beside)
        if choice.store == "ram":
            return device, None
        if not self._limits.fills_ram:
            in_ram = self._limits.in_ram
            return device, None if in_ram is None else max(0, in_ram - inputs.host)
        return device, self._limits.host - self._limits.process - inputs.host - self._device_on_host(choice)

    def _device_on_host(self, choice: Choice) -> int:
        """Returns what of the host's memory the device takes that is one with it, beside what its budget counts."""
        if not self._memory.is_host:
            return 0
        resident = self._memory.spread(choice.resident)
        taken = self._memory.taken(choice, Placed(window=choice.window, resident=resident, on_disk={}))
        root_gradients = 0 if self._is_one_pass(choice) else taken.root_gradients
        return taken.device + root_gradients + self._on_top(choice, resident)

    def of(self, choice: Choice) -> Mapping[str, int]:
        """Returns what a choice takes of each place in a step."""
        _, taken, on_top = self.placed(choice)
        device = taken.device + taken.root_gradients + on_top
        host = taken.host + self._limits.process
        if self._memory.is_host:
            return {"memory": device + host}
        return {"device": device, "host": host, HELD: taken.device}

    @property
    def limits(self) -> dict[str, int]:
        if self._memory.is_host:
            return {"memory": self._limits.host}
        limits = {"host": self._limits.host, "device": self._limits.device, HELD: self._limits.held}
        return {place: limit for place, limit in limits.items() if limit is not None}

    def written_bytes(self, choice: Choice) -> int:
        """Returns what a step writes to disk."""
        placed, _, _ = self.placed(choice)
        updated = sum(self.moved(placed, choice, number)["ring_bytes"] for number in placed.on_disk)
        return updated + self.passes(choice) * self.inputs(choice).disk

    def moved(self, placed: Placed, choice: Choice, number: int) -> dict[str, Any]:
        """Returns the bytes that a unit moves and the elements that it updates: none of a layer that does not run."""
        if number in self._computation.idle:
            return {"weight_bytes": 0, "gradient_bytes": 0, "elements": 0, "ring_bytes": 0}
        unit, there = self._memory.of(choice).units[number], placed.on_disk.get(number, frozenset())
        copied = unit.is_copied or not unit.is_root
        down = unit.gradients if copied else 0
        if unit.is_root and copied and self.passes(choice) > 1:  # the low halves of sums with them
            down += unit.remainders
        ring_bytes = update_bytes(unit, there, choice.states)
        replicas = 1 if number in placed.resident else self._memory.replicas  # of what stays, each has all
        return {
            "weight_bytes": unit.weights if copied else 0,
            "gradient_bytes": down,
            "elements": -(-unit.trained_elements // replicas),
            "ring_bytes": -(-ring_bytes // replicas),
        }

    def inputs_sent(self, micro_batch: int | None, number: int) -> int:
        """Returns what of a layer's inputs goes off the device in a step."""
        return self._inputs.sent(micro_batch, number)
