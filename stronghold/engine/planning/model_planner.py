"""Plans the training of a model: which settings fit a machine and make the shortest step, before anything is placed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stronghold.engine.planning.chosen_bytes import ChosenBytes
from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.engine.planning.muon_work import muon_assumed
from stronghold.engine.planning.op_seconds import OpSeconds, computing_s
from stronghold.planner.choices import Choice
from stronghold.planner.host_work import with_issuing
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import ADDED_BYTES, Pace, carried_s, machine_of, message_rates
from stronghold.planner.machine_share import all_reduce_s, reduced, share_of
from stronghold.planner.model_bytes import ModelBytes
from stronghold.planner.search import Work
from stronghold.planner.step import StepTime
from stronghold.planner.step_bytes import MUON, Placed
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings
from stronghold.spans import Span

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation

_LAYER = re.compile(r"layer \d+")


class ModelPlanner:
    """Answers for one model on one machine, choice by choice, what a step takes: the work, and the ``bytes``.

    Of the ``replicas`` of ``memory``, all on the machine, it answers for one, of whose part of the batch
    ``computation`` is. Layers that are recomputed have their inputs where ``activations`` says, as for ``offload``. A
    step adds up the gradients of so many batches, ``accumulate``; None stands for any number.
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
        accumulate: int | None = 1,
    ) -> None:
        self._memory, self._computation, self._machine = memory, computation, machine
        self._directories, self._recompute = directories, activations
        self.bytes = ChosenBytes(
            memory, computation, limits, machine.device, activations=activations, accumulate=accumulate
        )
        self._seconds = OpSeconds(machine, memory.replicas)
        self.dtype = memory.dtype
        self._layers: dict[tuple[Any, ...], LayerWork] = {}
        self._machines: dict[tuple[Any, ...], Machine] = {}

    def assumed(self, choice: Choice) -> list[str]:
        """Returns what a plan of it rests on that was not measured, in words."""
        found = muon_assumed(self._machine, self.dtype) if choice.states == MUON else []
        if self._recompute == "disk" and choice.micro_batch is not None:
            found.append("a layer's inputs of all micro-batches go to disk and back at once")
        if idle := len(self._computation.idle):
            layers = f"{idle} of {len(self._computation.group_of)} layers"
            found.append(f"{layers} do not run with such inputs, and take memory but no time")
        return found

    def work_of(self, choice: Choice, pace: Pace = "likely") -> Work:
        """Returns what a step of a choice consists of."""
        placed, _, _ = self.bytes.placed(choice)
        sizes, running = self._memory.of(choice), self._running
        resident = [place for place, number in enumerate(running) if number in placed.resident]
        return Work(
            layers=[self._layer_work(sizes, placed, choice, number, pace) for number in running],
            machine=self._machine_of(choice, pace),
            settings=self._settings(choice, resident, streamed=len(running) - len(resident)),
            root=self._root(sizes, placed, choice, pace),
        )

    def spans_of(self, step: StepTime) -> list[Span]:
        """Returns what is under way in a step of the layers that run, under their numbers in the model."""
        if not self._computation.idle:
            return step.spans
        names = {f"layer {place}": f"layer {number}" for place, number in enumerate(self._running)}
        return [one._replace(name=_LAYER.sub(lambda found: names[found[0]], one.name)) for one in step.spans]

    @cached_property
    def _running(self) -> list[int]:
        of = self._computation
        return [number for number in range(len(of.group_of)) if number not in of.idle]

    def _settings(self, choice: Choice, resident: Sequence[int] = (), streamed: int | None = None) -> StepSettings:
        of = self._computation
        return StepSettings(
            window=choice.window if streamed is None else max(1, min(choice.window, streamed)),
            resident=resident,
            in_backward=choice.update == "in_backward",
            pieces=-(-of.batch // of.layer(0, choice.micro_batch).samples),
            staged=not self._memory.is_host,
            passes=self.bytes.passes(choice),
        )

    def computing_s(self, micro_batch: int | None) -> float:
        """Returns what a step over such a micro-batch computes at the least, wherever units are."""
        return computing_s(self._computation, self._seconds, micro_batch)

    def _layer_work(self, sizes: ModelBytes, placed: Placed, choice: Choice, number: int, pace: Pace) -> LayerWork:
        """Returns what a layer does: the same as another one of its kind that is where this one is."""
        of, resident, there = self._computation, number in placed.resident, placed.on_disk.get(number) or ()
        again = number < len(of.group_of) - choice.kept
        kind = of.group_of[number], sizes.kind_of(number), number if choice.states == MUON else None
        input_bytes = self.bytes.inputs_sent(choice.micro_batch, number)
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
                add_s=self._add_s(sizes, number, pace),
                **self.bytes.moved(placed, choice, number),
                **self._iterations(number, pace, resident=resident),
            )
            self._layers[key] = with_issuing(
                work, self._machine_of(choice, pace), self._settings(choice), resident=resident
            )
        return self._layers[key]

    def _machine_of(self, choice: Choice, pace: Pace) -> Machine:
        """Returns what a replica has of the machine under a choice."""
        key = choice.micro_batch, choice.states, choice.store, self.bytes.passes(choice), pace
        if key not in self._machines:
            of = self._computation
            runs = [of.layer(number, choice.micro_batch) for number in self._running]
            machine = machine_of(
                self._machine,
                dtype=self.dtype,
                states=choice.states,
                directories=self._directories if choice.store != "ram" else (),
                layer_ops=sum(sum(run.forward.values()) for run in runs) / len(runs),
                adds=self.bytes.passes(choice) > 1,
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
                add_s=self._add_s(sizes, number, pace),
                **self.bytes.moved(placed, choice, number),
                **self._iterations(number, pace, resident=number in placed.resident),
            )
            for number, (unit, _) in enumerate(self._memory.units.root, first)
        ]
        of = self._seconds.of
        before = RootWork(first=True, forward_s=of(root.before, pace), backward_s=of(root.before_backward, pace))
        behind = RootWork(first=False, forward_s=of(root.behind, pace), backward_s=of(root.behind_backward, pace))
        return [*(work for work in works if work.first), before, behind, *(work for work in works if not work.first)]

    def _iterations(self, number: int, pace: Pace, *, resident: bool) -> dict[str, Any]:
        """Returns a unit's matrices that Muon updates, and the seconds of their iterations."""
        if not (one := self._memory.muon[number]).indices:
            return {}
        seconds = self._seconds.of(one.iterations, pace)
        if not (resident or self._memory.is_host):  # directions go there and back
            seconds += carried_s(self._machine, pace, one.directions_bytes, len(one.indices))
        return {"matrices": len(one.indices), "iteration_s": seconds}

    def _add_s(self, sizes: ModelBytes, number: int, pace: Pace) -> float:
        """Returns what a unit's gradients take that are added to those of a pass before on the device."""
        unit = sizes.units[number]
        if not unit.trained:
            return 0.0
        moved_bytes = ADDED_BYTES.get(self.dtype, 12) * unit.trained_elements
        return self._seconds.of_sum(moved_bytes // 3, self.dtype, pace)

    def _mean_s(self, sizes: ModelBytes, placed: Placed, number: int) -> float:
        """Returns what the mean of a unit's gradients takes that stay on the device, in each of the replicas."""
        unit, replicas = sizes.units[number], self._memory.replicas
        on_device = number in placed.resident or (unit.is_root and not unit.is_copied)
        if replicas == 1 or not unit.trained or not on_device:
            return 0.0
        return all_reduce_s(unit.gradients, replicas, **message_rates(self._machine))
