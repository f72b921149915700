"""Plans the training of a model: which settings fit a machine and make the shortest step, before anything is placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stronghold.engine.planning.kept_inputs import InputsOfLayers, KeptInputs
from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.engine.planning.most_alive import most_alive
from stronghold.engine.planning.muon_work import muon_assumed
from stronghold.engine.planning.op_seconds import OpSeconds, computing_s
from stronghold.planner.choices import Choice
from stronghold.planner.host_work import with_issuing
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import Pace, carried_s, machine_of, message_rates
from stronghold.planner.machine_share import all_reduce_s, reduced, share_of
from stronghold.planner.model_bytes import ModelBytes
from stronghold.planner.search import Work
from stronghold.planner.step_bytes import MUON, Placed, StepBytes
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation

HELD = "held device"
"""What of the device is held from step to step, as a place of its own."""


class ModelPlanner:
    """Answers for one model on one machine, choice by choice, what a step takes: the work, and the bytes.

    Of the ``replicas`` of ``memory``, all on the machine, it answers for one, of whose part of the batch
    ``computation`` is. Layers that are recomputed have their inputs where ``activations`` says, as for ``offload``.
    """

    def __init__(
        self,
        memory: ModelMemory,
        computation: ModelComputation,
        machine: MachineFile,
        limits: Limits,
        directories: Sequence[str] = (),
        *,
        activations: str = "recompute",
    ) -> None:
        self._memory, self._computation, self._machine, self._limits = memory, computation, machine, limits
        self._directories, self._recompute = directories, activations
        self._inputs = InputsOfLayers(computation, activations, memory.block_bytes)
        of_device = memory.replicas if memory.is_host else 1  # replicas there have its cores in common
        self._seconds = OpSeconds(machine, of_device)
        self.dtype = memory.dtype
        self._layers: dict[tuple[Any, ...], LayerWork] = {}
        self._machines: dict[tuple[Any, ...], Machine] = {}
        self._activations: dict[tuple[int | None, int], int] = {}
        self._placed: dict[Choice, tuple[Placed, StepBytes, int]] = {}

    # Bytes.

    def activation_bytes(self, choice: Choice) -> int:
        """Returns the most that activations, and gradients of them, take on the device in a step.

        That is where they and the gradients of root parameters, which are counted apart, take the most together; with
        several batches in the limits, that of so many times the batch.
        """
        key = choice.micro_batch, choice.kept
        if key not in self._activations:
            root_gradients = sum(unit.root_gradient for unit in self._memory.of(choice).root)
            self._activations[key] = max(0, self._limits.batches * most_alive(self._computation, *key) - root_gradients)
        return self._activations[key]

    def inputs(self, choice: Choice) -> KeptInputs:
        """Returns what layers' inputs take that are not kept on the device."""
        return self._inputs.taken(choice.micro_batch)

    def placed(self, choice: Choice) -> tuple[Placed, StepBytes, int]:
        """Returns where units are, what they take, and what activations, updates and rounding take on top in a step."""
        if choice not in self._placed:
            activations, inputs = self.activation_bytes(choice), self.inputs(choice)
            device, host = self.budgets(choice, activations)
            placed = self._memory.placed(choice, device_memory=device, host_memory=host)
            taken = self._memory.taken(choice, placed)
            taken = replace(taken, pinned=taken.pinned + inputs.host, disk=taken.disk + inputs.disk)
            self._placed[choice] = placed, taken, self._with_updates(choice, placed)
        return self._placed[choice]

    def _with_updates(self, choice: Choice, placed: Placed) -> int:
        """Returns the most that activations and updates of resident units take together, and blocks beside their bytes.

        Updates in the backward pass run beside activations, but for those of root parameters that are used before the
        layers: their gradients come last.
        """
        beside, behind = frozenset[int](), placed.resident
        if choice.update == "in_backward":
            beside, behind = placed.resident - self._used_first, placed.resident & self._used_first
        activations = self.activation_bytes(choice) + self._on_device_bytes(choice, beside)
        on_top = max(activations, self._on_device_bytes(choice, behind))
        on_top += self._memory.iterations_bytes(placed.resident)[0]  # which go on under the next forward pass
        return on_top + self.inputs(choice).device + self._memory.rounding(choice, placed.resident)

    @cached_property
    def _used_first(self) -> frozenset[int]:
        """The numbers of the root parameters that are used before the layers."""
        units, used_first = self._memory.units, self._computation.root.used_first
        root = enumerate(units.root, len(units.layers))
        return frozenset(n for n, (unit, _) in root if any(id(p) in used_first for p in unit.parameters))

    def _on_device_bytes(self, choice: Choice, resident: frozenset[int]) -> int:
        """Returns what updates of so many resident units take on the device while they run."""
        scratch = self._memory.scratch(choice, resident, self._machine.device)
        _, iterations = self._memory.iterations_bytes(resident)
        if not iterations:
            return scratch
        return scratch + iterations + max(self._memory.muon[number].part_bytes for number in resident)

    def update_bytes(self, choice: Choice) -> int:
        """Returns what the report says of an update on the device: Muon's iterations."""
        return sum(self._memory.iterations_bytes(self.placed(choice)[0].resident))

    def assumed(self, choice: Choice) -> list[str]:
        """Returns what a plan of it rests on that was not measured, in words."""
        found = muon_assumed(self._machine, self.dtype) if choice.states == MUON else []
        if self._recompute == "disk" and choice.micro_batch is not None:
            found.append("a layer's inputs of all micro-batches go to disk and back at once")
        return found

    def budgets(self, choice: Choice, activations: int) -> tuple[int | None, int | None]:
        """Returns what ``device_memory`` and ``host_memory`` are for ``offload``: what is left beside activations."""
        sizes, count = self._memory.of(choice), len(self._memory.units.layers)
        trained = [number for number, unit in enumerate(sizes.root, count) if unit.trained]  # these may all be resident
        rounding = self._memory.rounding(choice, sizes.joined(self._memory.spread(choice.resident), trained))
        inputs = self.inputs(choice)
        beside = activations + inputs.device + rounding + self._memory.iterations_bytes(())[0]
        beside += sum(unit.root_gradient for unit in sizes.root)
        device = None if self._limits.device is None else max(0, self._limits.device - beside)
        if choice.store == "ram":
            return device, None
        if not self._limits.fills_ram:
            in_ram = self._limits.in_ram
            return device, None if in_ram is None else max(0, in_ram - inputs.host)
        on_host = inputs.host + (activations if self._memory.is_host else 0)
        return device, self._limits.host - self._limits.process - on_host

    def bytes_of(self, choice: Choice) -> Mapping[str, int]:
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
        sizes = self._memory.of(choice)
        updated = sum(self._moved(sizes, placed, choice, number)["ring_bytes"] for number in placed.on_disk)
        return updated + self.inputs(choice).disk

    # Time.

    def work_of(self, choice: Choice, pace: Pace = "likely") -> Work:
        """Returns what a step of a choice consists of."""
        placed, _, _ = self.placed(choice)
        sizes, count = self._memory.of(choice), len(self._computation.group_of)
        return Work(
            layers=[self._layer_work(sizes, placed, choice, number, pace) for number in range(count)],
            machine=self._machine_of(choice, pace),
            settings=self._settings(choice, sorted(number for number in placed.resident if number < count)),
            root=self._root(sizes, placed, choice, pace),
        )

    def _settings(self, choice: Choice, resident: Sequence[int] = ()) -> StepSettings:
        of = self._computation
        return StepSettings(
            window=choice.window,
            resident=resident,
            in_backward=choice.update == "in_backward",
            pieces=-(-of.batch // of.layer(0, choice.micro_batch).samples),
            staged=not self._memory.is_host,
        )

    def computing_s(self, micro_batch: int | None) -> float:
        """Returns what a step over such a micro-batch computes at the least, wherever units are."""
        return computing_s(self._computation, self._seconds, micro_batch)

    def _layer_work(self, sizes: ModelBytes, placed: Placed, choice: Choice, number: int, pace: Pace) -> LayerWork:
        """Returns what a layer does: the same as another one of its kind that is where this one is."""
        of, resident, there = self._computation, number in placed.resident, placed.on_disk.get(number) or ()
        again = number < len(of.group_of) - choice.kept
        kind = of.group_of[number], sizes.kind_of(number), number if choice.states == MUON else None
        input_bytes = self._inputs.sent(choice.micro_batch, number)
        settings = choice.micro_batch, choice.states, choice.store, choice.update, pace
        key = *kind, resident, there, again, input_bytes, *settings
        if key not in self._layers:
            run = of.layer(number, choice.micro_batch)
            scale = of.batch / run.samples
            forward_s, backward_s, before_s = (
                scale * self._seconds.of(ops, pace) for ops in (run.forward, run.backward, run.before_gradients)
            )
            again_s = forward_s if again else 0.0
            # Each micro-batch but the first adds its gradients to those before.
            backward_s += (scale - 1) * self._seconds.of_sum(sizes.units[number].gradients, self.dtype, pace)
            backward_s += self._mean_s(sizes, placed, number)
            if not resident:  # they go into a slot
                backward_s += self._seconds.of_copy(sizes.units[number].gradients, self.dtype, pace)
            forward_s += scale * self._seconds.of_copy(round(input_bytes / scale), self.dtype, pace)
            work = LayerWork(
                forward_s=forward_s,
                backward_s=again_s + backward_s,
                first_gradient_s=again_s + before_s,
                on_disk="weights" in there,
                recomputed=again,
                input_bytes=input_bytes,
                inputs_on_disk=self._recompute == "disk",
                **self._moved(sizes, placed, choice, number),
                **self._iterations(number, pace, resident=resident),
            )
            self._layers[key] = with_issuing(
                work, self._machine_of(choice, pace), self._settings(choice), resident=resident
            )
        return self._layers[key]

    def _machine_of(self, choice: Choice, pace: Pace) -> Machine:
        """Returns what a replica has of the machine under a choice."""
        key = choice.micro_batch, choice.states, choice.store, pace
        if key not in self._machines:
            count = len(self._computation.group_of)
            runs = (self._computation.layer(number, choice.micro_batch) for number in range(count))
            machine = machine_of(
                self._machine,
                dtype=self.dtype,
                states=choice.states,
                directories=self._directories if choice.store != "ram" else (),
                layer_ops=sum(sum(run.forward.values()) for run in runs) / count,
                pace=pace,
            )
            share = share_of(machine, self._memory.replicas, is_host=self._memory.is_host)
            self._machines[key] = reduced(share, self._memory.replicas, **message_rates(self._machine))
        return self._machines[key]

    def _root(self, sizes: ModelBytes, placed: Placed, choice: Choice, pace: Pace) -> list[RootWork]:
        root, first = self._computation.root, len(sizes.layers)
        works = [
            RootWork(
                first=id(unit.parameters[0]) in root.used_first,
                resident=number in placed.resident,
                backward_s=self._mean_s(sizes, placed, number),
                **self._moved(sizes, placed, choice, number),
                **self._iterations(number, pace, resident=number in placed.resident),
            )
            for number, (unit, _) in enumerate(self._memory.units.root, first)
        ]
        of = self._seconds.of
        before = RootWork(first=True, forward_s=of(root.before, pace), backward_s=of(root.before_backward, pace))
        behind = RootWork(first=False, forward_s=of(root.behind, pace), backward_s=of(root.behind_backward, pace))
        return [*(work for work in works if work.first), before, behind, *(work for work in works if not work.first)]

    def _moved(self, sizes: ModelBytes, placed: Placed, choice: Choice, number: int) -> dict[str, Any]:
        """Returns the bytes that a unit moves and the elements that it updates."""
        unit, there = sizes.units[number], placed.on_disk.get(number, frozenset())
        copied = unit.is_copied or not unit.is_root
        ring_bytes = sum(unit.part(part, choice.states) for part in there) if "moments" in there else 0
        replicas = 1 if number in placed.resident else self._memory.replicas  # of what stays, each has all
        return {
            "weight_bytes": unit.weights if copied else 0,
            "gradient_bytes": unit.gradients if copied else 0,
            "elements": -(-unit.trained_elements // replicas),
            "ring_bytes": -(-ring_bytes // replicas) if unit.trained else 0,
        }

    def _iterations(self, number: int, pace: Pace, *, resident: bool) -> dict[str, Any]:
        """Returns a unit's matrices that Muon updates, and the seconds of their iterations."""
        if not (one := self._memory.muon[number]).indices:
            return {}
        seconds = self._seconds.of(one.iterations, pace)
        if not (resident or self._memory.is_host):  # directions go there and back
            seconds += carried_s(self._machine, pace, one.directions_bytes, len(one.indices))
        return {"matrices": len(one.indices), "iteration_s": seconds}

    def _mean_s(self, sizes: ModelBytes, placed: Placed, number: int) -> float:
        """Returns what the mean of a unit's gradients takes that stay on the device, in each of the replicas."""
        unit, replicas = sizes.units[number], self._memory.replicas
        on_device = number in placed.resident or (unit.is_root and not unit.is_copied)
        if replicas == 1 or not unit.trained or not on_device:
            return 0.0
        return all_reduce_s(unit.gradients, replicas, **message_rates(self._machine))
