"""Answers for a row of layers on one machine what a step in stages takes: the work, and the bytes of each process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stronghold.distributed.row_costs import RowCosts
from stronghold.distributed.taken import Taken
from stronghold.engine.budget import BUFFERS
from stronghold.engine.planning.model_planner import Limits
from stronghold.planner.disk_parts import parts_on_disk
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import Pace, machine_of, message_rates, messages_s
from stronghold.planner.machine_share import all_reduce_s, reduced, share_of
from stronghold.planner.model_bytes import ModelBytes, Part
from stronghold.planner.offloaded_stages import OffloadedLayer, OffloadedStages
from stronghold.planner.shared_root import summing_bytes, updated_on_host_s
from stronghold.planner.stage_costs import LayerCost
from stronghold.planner.stage_disk import OnDisk, StageDisk
from stronghold.planner.staged_search import StagedChoice
from stronghold.planner.staged_step import StagedStep, StagedWork
from stronghold.planner.step_bytes import (
    Placed,
    held_on_device,
    step_bytes,
    sums_bytes,
    update_bytes,
    written_bytes,
)
from stronghold.planner.step_costs import Machine


class StagePlanner:
    """Answers choice by choice for so many ``processes`` that are all on the ``machine``, each with its share of it.

    Updates are deferred. Where layers stay on the device they are updated there, as are the root parameters of a stage
    whose device has memory of its own. Layers are in RAM, or all of them in ``directories``. ``limits`` are each
    process's.
    """

    def __init__(
        self,
        row: RowCosts,
        machine: MachineFile,
        limits: Limits,
        *,
        dtype: str,
        batch: int,
        processes: int,
        directories: Sequence[str] = (),
    ) -> None:
        self._row, self._machine, self._limits, self.directories = row, machine, limits, directories
        self._dtype, self._batch, self._processes = dtype, batch, processes
        self._layers: dict[tuple[StagedChoice, Pace], list[LayerCost]] = {}
        self._moved: dict[tuple[int, str, str], list[OffloadedLayer]] = {}
        self._updates_s: dict[tuple[int, str, Pace], list[float]] = {}
        self._works: dict[tuple[StagedChoice, Pace], StagedWork] = {}
        self._working: dict[tuple[int, bool | None], int] = {}

    @property
    def place(self) -> str:
        """Which memory a stage is cut by."""
        return "memory" if self._machine.is_host else "device"

    @property
    def limits(self) -> dict[str, int]:
        if self._limits.device is None:
            return {self.place: self._limits.host}
        return {self.place: self._limits.device, "host": self._limits.host}

    def work_of(self, choice: StagedChoice, pace: Pace = "likely") -> StagedWork:
        """Returns what a step of a choice consists of."""
        if (choice, pace) not in self._works:
            self._works[choice, pace] = self._work_of(choice, pace)
        return self._works[choice, pace]

    def _work_of(self, choice: StagedChoice, pace: Pace) -> StagedWork:
        machine, layers = self._share(choice, pace), self._costs(choice, pace)
        offloaded, update_s = None, list[float]()
        if choice.window is not None:
            offloaded = OffloadedStages(
                window=choice.window,
                layers=self._offloaded(choice),
                gradient_slots=BUFFERS.gradient_slots,
                machine=machine,
                disk=self._disk(choice, machine),
            )
        else:
            update_s = self._updates_of(choice, machine, pace)
        return StagedWork(
            layers=layers,
            pipeline=choice.pipeline,
            memory_bytes=self.limits[self.place] - self._beside_bytes(choice),
            is_kept=choice.is_kept,
            link_s=messages_s(self._machine, [layer.input_bytes for layer in layers]),
            offloaded=offloaded,
            update_s=update_s,
            shared_s=self._shared_s(choice, pace),
        )

    def bytes_of(self, choice: StagedChoice, step: StagedStep) -> Mapping[str, int]:
        """Returns the most that any process takes of each place."""
        found: dict[str, int] = {}
        for one in self.taken(choice, step):
            device, host = one.device_bytes, one.host_bytes + self._limits.process
            each = {self.place: device + host} if self._machine.is_host else {self.place: device, "host": host}
            found = {place: max(size, found.get(place, 0)) for place, size in each.items()}
        return found

    def taken(self, choice: StagedChoice, step: StagedStep) -> list[Taken]:
        """Returns what each process of a replica takes when the row is cut."""
        work, found = self.work_of(choice), []
        for process in range(choice.processes):
            stages = [step.partition.stages[number] for number in choice.pipeline.stages_of(process)]
            memory = self._memory(choice)
            row = [one for stage in stages for one in memory[stage.first : stage.first + stage.layers]]
            model = ModelBytes(
                layers=[one.layers[0] for one in row],
                root=[unit for one in row for unit in one.root],
                buffers=sum(one.buffers for one in row),
                is_host=self._machine.is_host,
            )
            resident = self._resident(model, choice)
            window, there = min(choice.window or 1, len(row)), self._on_disk(model, resident, choice)
            held = step_bytes(
                model,
                Placed(window=window, resident=resident, on_disk=there),
                BUFFERS,
                states=choice.states,
                replicas=choice.replicas,
            )
            on_host, on_device = sums_bytes(model, resident, choice.micro_batches, replicas=choice.replicas)
            on_top = self._working_bytes(choice)
            for stage in stages:
                end = stage.first + stage.layers
                if work.offloaded is None:
                    weights = sum(layer.weight_bytes for layer in work.layers[stage.first : end])
                else:
                    weights = int(work.offloaded.held_bytes(stage.first, end))
                on_top += stage.memory_bytes - weights
            device_memory = held_on_device(model, window, resident, BUFFERS) + on_device
            written = written_bytes(model, there, states=choice.states, replicas=choice.replicas)
            on_top = on_device + max(on_top, summing_bytes(model.root))
            found.append(Taken(held, on_top, device_memory, written, on_host))
        return found

    def _memory(self, choice: StagedChoice) -> list[ModelBytes]:
        return self._row.memory if choice.store == "ram" else self._row.memory_on_disk

    def _on_disk(self, model: ModelBytes, resident: frozenset[int], choice: StagedChoice) -> dict[int, frozenset[Part]]:
        if choice.store == "ram":
            return {}
        return parts_on_disk(model, range(len(model.units)), resident, BUFFERS, None, processes=choice.replicas)

    def _disk(self, choice: StagedChoice, machine: Machine) -> StageDisk | None:
        """Returns what stages have on disk, by sums over their layers."""
        if choice.store == "ram":
            return None
        assert choice.window is not None
        kinds = {id(one): one for one in self._memory(choice)}
        made = {kind: OnDisk.of(one, self._resident(one, choice), choice.states) for kind, one in kinds.items()}
        return StageDisk(
            window=choice.window,
            layers=[made[id(one)] for one in self._memory(choice)],
            machine=machine,
            replicas=choice.replicas,
            staged=not self._machine.is_host,
        )

    def _resident(self, model: ModelBytes, choice: StagedChoice) -> frozenset[int]:
        """Returns what stays on the device: layers without a window, and root parameters apart from the host.

        Those that another process has, too, are updated on the host by both.
        """
        count = len(model.layers)
        layers = range(count) if choice.window is None else range(0)
        apart = [] if model.is_host else model.root
        root = [number for number, unit in enumerate(apart, count) if unit.trained and not unit.is_shared]
        return frozenset([*layers, *root])

    def _costs(self, choice: StagedChoice, pace: Pace) -> list[LayerCost]:
        key = choice._replace(window=None if choice.window is None else 1, is_kept=False), pace
        if key not in self._layers:
            rows = self._row.of(self._batch // choice.replicas // choice.micro_batches)
            weights, found = self._alone(choice), list[LayerCost]()
            known: dict[tuple[int, int], LayerCost] = {}  # most layers are like others
            for row, memory in zip(rows, self._memory(choice), strict=True):
                if (id(row), id(memory)) not in known:
                    forward_s, backward_s = (
                        self._row.seconds(ops, pace, self._processes) for ops in (row.forward, row.backward)
                    )
                    known[id(row), id(memory)] = LayerCost(
                        forward_s=forward_s,
                        backward_s=backward_s,
                        weight_bytes=weights[id(memory)],
                        activation_bytes=row.saved_bytes,
                        input_bytes=row.input_bytes,
                    )
                found.append(known[id(row), id(memory)])
            self._layers[key] = found
        return self._layers[key]

    def _alone(self, choice: StagedChoice) -> dict[int, int]:
        """Returns what each kind of layer takes in a stage by itself, but for slots: on the host's device all of it."""
        found = {}
        for memory in {id(one): one for one in self._memory(choice)}.values():
            resident = self._resident(memory, choice)
            placed = Placed(window=1, resident=resident, on_disk=self._on_disk(memory, resident, choice))
            held = step_bytes(memory, placed, BUFFERS, states=choice.states, replicas=choice.replicas)
            on_host, on_device = sums_bytes(memory, resident, choice.micro_batches, replicas=choice.replicas)
            found[id(memory)] = held.root + held.resident + held.root_gradients + on_device
            if self._machine.is_host:
                staged = 0 if choice.window is None else BUFFERS.gradient_slots * memory.layers[0].gradients
                found[id(memory)] += held.host - staged - self._ring_bytes(memory, choice) + on_host
        return found

    def _offloaded(self, choice: StagedChoice) -> list[OffloadedLayer]:
        key = choice.replicas, choice.states, choice.store
        if key not in self._moved:
            weights, is_host, replicas = self._alone(choice), self._machine.is_host, choice.replicas
            made = {
                kind: OffloadedLayer(
                    slot_bytes=one.layers[0].slot,
                    gradient_bytes=one.layers[0].gradient_slot,
                    root_bytes=weights[kind],
                    elements=-(-one.layers[0].trained_elements // replicas)
                    + is_host * sum(-(-unit.trained_elements // replicas) for unit in one.root),
                )
                for kind, one in {id(one): one for one in self._memory(choice)}.items()
            }
            self._moved[key] = [made[id(one)] for one in self._memory(choice)]
        return self._moved[key]

    def _updates_of(self, choice: StagedChoice, machine: Machine, pace: Pace) -> list[float]:
        key = choice.replicas, choice.states, pace
        if key not in self._updates_s:
            kinds = {id(one): one for one in self._row.memory}
            taken_s = {kind: self._update_s(one, choice, machine) for kind, one in kinds.items()}
            self._updates_s[key] = [taken_s[id(one)] for one in self._row.memory]
        return self._updates_s[key]

    def _update_s(self, one: ModelBytes, choice: StagedChoice, machine: Machine) -> float:
        """Returns what a layer and the root beside it take behind the last pass, where they stay on the device."""
        units = [unit for unit in one.units if unit.trained and (one.is_host or not unit.is_shared)]
        elements, gradient_bytes = (sum(getattr(u, name) for u in units) for name in ("trained_elements", "gradients"))
        update_s = elements * machine.device_update_ns * 1e-9
        if choice.replicas > 1:
            update_s += all_reduce_s(gradient_bytes, choice.replicas, **message_rates(self._machine))
        return update_s

    def _shared_s(self, choice: StagedChoice, pace: Pace) -> float:
        """Returns what parameters that the first stage and the last one share take in a step, beside its passes."""
        if not self._row.shared_bytes:
            return 0.0
        rates, machine = message_rates(self._machine), self._share(choice, pace, replicas=1)
        update_s = updated_on_host_s(self._memory(choice)[0].root, machine, choice.replicas, **rates)
        return all_reduce_s(self._row.shared_bytes, 2, **rates) + update_s

    def _working_bytes(self, choice: StagedChoice) -> int:
        samples = self._batch // choice.replicas // choice.micro_batches
        key = samples, choice.is_kept
        if key not in self._working:
            ways = (False, True) if choice.is_kept is None else (choice.is_kept,)
            self._working[key] = max(row.working_bytes[way] for row in self._row.of(samples) for way in ways)
        return self._working[key]

    def _beside_bytes(self, choice: StagedChoice) -> int:
        """Returns what a process takes of the place by which stages are cut, whichever layers it has."""
        beside = self._working_bytes(choice)
        if self._machine.is_host:
            beside += self._limits.process
            if choice.window is not None:
                beside += BUFFERS.gradient_slots * max(one.layers[0].gradients for one in self._memory(choice))
            if choice.store != "ram":
                kinds = {id(one): one for one in self._memory(choice)}.values()
                beside += max(self._ring_bytes(one, choice) for one in kinds)
        return beside

    def _ring_bytes(self, memory: ModelBytes, choice: StagedChoice) -> int:
        """Returns what the ring takes for a layer and the root beside it."""
        on_disk = self._on_disk(memory, self._resident(memory, choice), choice)
        longest = (update_bytes(memory.units[n], there, choice.states) for n, there in on_disk.items())
        return BUFFERS.ring(max(longest, default=0))

    def _share(self, choice: StagedChoice, pace: Pace, *, replicas: int | None = None) -> Machine:
        directories = self.directories if choice.store != "ram" else ()
        rates = machine_of(self._machine, dtype=self._dtype, states=choice.states, directories=directories, pace=pace)
        if directories and self._machine.is_host:  # layers are read into their slots
            rates = replace(rates, h2d_bytes_per_s=math.inf)
        share = share_of(rates, self._processes, is_host=self._machine.is_host)
        return reduced(share, replicas or choice.replicas, **message_rates(self._machine))
