"""What a model takes of each memory under each choice of settings, before anything is placed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from stronghold.engine.budget import BUFFERS, model_bytes
from stronghold.engine.find_layers import find_layers
from stronghold.engine.model_units import ModelUnits, check_micro_batch, units_of
from stronghold.engine.planning.muon_work import MuonUnit, muon_units
from stronghold.layout import ALIGNMENT_BYTES, PAGE_BYTES
from stronghold.optim.adamw_on_device import scratch_bytes
from stronghold.planner.choices import Choice
from stronghold.planner.disk_parts import UNKNOWN, Known, parts_on_disk
from stronghold.planner.model_bytes import ModelBytes
from stronghold.planner.step_bytes import (
    MUON,
    Placed,
    StepBytes,
    device_bytes,
    held_on_device,
    resident_root,
    spread,
    step_bytes,
)
from stronghold.unit import Unit, part_of
from stronghold.window import add_scratch_bytes

_CHUNK = 65536
"""Elements that a block of PyTorch's ``multi_tensor_apply`` works on (ATen/native/cuda/MultiTensorApply.cuh)."""


class ModelMemory:
    """The bytes of ``model``, in memory or on the meta device, which is not changed.

    ``layers`` and ``dtype`` are as for ``offload``; ``is_host`` tells that the device's memory is the host's, and
    ``block_bytes`` is what its allocator rounds each buffer up to. Bytes are those of one of ``replicas`` on a machine,
    each of which counts its part of what all have in common; by how little more a gradient slot takes whose shares are
    of equal length is not in them. ``by_muon`` tells that the optimizer is ``stronghold.Muon``, and ``accumulates``
    that a step adds up several gradients. Raises ValueError for a model that cannot be offloaded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        is_host: bool,
        replicas: int = 1,
        block_bytes: int = 1,
        by_muon: bool = False,
        accumulates: bool = False,
    ) -> None:
        self._by_muon, self._accumulates = by_muon, accumulates
        self._given = model, layers, dtype
        self.replicas = replicas
        self.is_host = is_host
        self.block_bytes = block_bytes
        self.units = self._units(ALIGNMENT_BYTES)
        self._in_memory = self._bytes(self.units)
        self._scratch: dict[tuple[str, str], list[int]] = {}
        self._taken_by_one: dict[tuple[str, str, frozenset[int]], StepBytes] = {}
        self._rounding: dict[tuple[bool, str], tuple[list[int], list[int]]] = {}
        self._rounded: dict[tuple[bool, str, frozenset[int]], int] = {}
        self._most_scratch: dict[tuple[str, str, frozenset[int]], int] = {}
        self._squares: dict[frozenset[int], int] = {}
        self._adding: dict[frozenset[int], tuple[int, int]] = {}
        self._spread: dict[int, frozenset[int]] = {}
        self._root: list[int] | None = None
        """The root parameters that are resident whatever is chosen, by number; None where that is open."""

    def _units(self, alignment: int) -> ModelUnits:
        return units_of(*self._given, alignment, apart=not self.is_host, in_pieces=False)

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether the layers can run over micro-batches."""
        model, layers, _ = self._given
        try:
            check_micro_batch(find_layers(model, layers))
        except ValueError:
            return False
        return True

    def _bytes(self, units: ModelUnits) -> ModelBytes:
        model = model_bytes(
            units.layers,
            [unit for unit, _ in units.root],
            units.buffer_bytes,
            is_host=self.is_host,
            accumulates=self._accumulates,
        )
        if not self._by_muon:
            return model
        counted = [one.counted(own) for one, own in zip(muon_units(units), model.units, strict=True)]
        return replace(model, layers=counted[: len(units.layers)], root=counted[len(units.layers) :])

    @cached_property
    def dtype(self) -> str:
        """What layers compute in, by its name: where all of their weights are packed, what those beside them do."""
        units = [*self.units.layers[:1], *(unit for unit, _ in self.units.root)]
        own = (unit.dtype for unit in units if any(part_of(parameter) is None for parameter in unit.parameters))
        return str(next(own, torch.float32)).removeprefix("torch.")

    @cached_property
    def _on_disk(self) -> ModelBytes:
        """Tensors on disk begin at pages."""
        return self._bytes(self._units(PAGE_BYTES))

    @cached_property
    def _all(self) -> list[Unit]:
        return [*self.units.layers, *(unit for unit, _ in self.units.root)]

    @cached_property
    def _order(self) -> list[int]:
        """The units' numbers, layers first, in the order of the model's parameters."""
        numbers = {unit: n for n, unit in enumerate(self._all)}
        return [numbers[unit] for unit in self.units.units]

    def of(self, choice: Choice) -> ModelBytes:
        """Returns the bytes of units in the store that was chosen."""
        return self._in_memory if choice.store == "ram" else self._on_disk

    def place_root(self, resident: Collection[str]) -> None:
        """Has the root parameters of these names be resident under each choice, and no others."""
        root = enumerate(self.units.root, len(self.units.layers))
        self._root = [number for number, (unit, _) in root if unit.name in resident]

    def spread(self, resident: int) -> frozenset[int]:
        """Returns which layers stay on the device of so many, the same set each time."""
        if resident not in self._spread:
            self._spread[resident] = frozenset(spread(len(self.units.layers), resident))
        return self._spread[resident]

    def placed(
        self, choice: Choice, *, device_memory: int | None, host_memory: int | None, known: Known = UNKNOWN
    ) -> Placed:
        """Returns where units are under the settings of ``choice`` and these budgets, as ``offload`` places them."""
        model = self.of(choice)
        layers = self.spread(choice.resident)
        root = self._root
        if root is None:
            root = resident_root(model, choice.window, layers, BUFFERS, device_memory or 0)
        resident = model.joined(layers, root)
        on_disk = {}
        if choice.store != "ram":
            on_disk = parts_on_disk(
                model, self._order, resident, BUFFERS, host_memory, processes=self.replicas, known=known
            )
        return Placed(window=choice.window, resident=resident, on_disk=on_disk)

    def device_memory(self, choice: Choice, placed: Placed) -> int:
        """Returns the budget with which ``offload`` places units so: there, resident moments count in fp32."""
        return held_on_device(self.of(choice), choice.window, placed.resident, BUFFERS)

    def rounding(self, choice: Choice, resident: Collection[int]) -> int:
        """Returns what buffers and gradients on the device take beside their own bytes, for it gives whole blocks.

        One of them has the flag that tells of gradients that are not finite, which counts nowhere else.
        """
        if self.is_host:
            return 0
        model, block = self.of(choice), self.block_bytes
        streamed = model.streamed(resident)
        slots = min(choice.window, streamed.layers) * (-streamed.slot % block)
        slots += BUFFERS.gradient_slots * (-streamed.gradient_slot % block)
        key = choice.store == "ram", choice.states, frozenset(resident)
        if key not in self._rounded:
            there, apart = self._rounding_of_units(choice)
            root = (apart[number] for number in range(len(model.layers), len(model.units)) if number not in resident)
            self._rounded[key] = sum(there[number] for number in resident) + sum(root)
        return block + slots + self._rounding_of_buffers + self._rounded[key]

    def _rounding_of_units(self, choice: Choice) -> tuple[list[int], list[int]]:
        """Returns what blocks take beside each unit's bytes: where it is resident, and for a root's copy where not."""
        key = choice.store == "ram", choice.states
        if key not in self._rounding:
            there, apart = list[int](), list[int]()
            for unit, counted in zip(self._all, self.of(choice).units, strict=True):
                each = [p.numel() * dtype.itemsize for p, dtype in zip(unit.parameters, unit.dtypes, strict=True)]
                trained = [size for p, size in zip(unit.parameters, each, strict=True) if p.requires_grad]
                held = [counted.weights, counted.remainders, counted.part("moments", choice.states), *trained]
                there.append(sum(-size % self.block_bytes for size in held))
                apart.append(sum(-size % self.block_bytes for size in each))
            self._rounding[key] = there, apart
        return self._rounding[key]

    @cached_property
    def _rounding_of_buffers(self) -> int:
        found = (module._buffers[name] for module, name in self.units.buffers)
        return sum(-b.numel() * b.element_size() % self.block_bytes for b in found if b is not None)

    def squares_bytes(self, resident: Collection[int]) -> int:
        """Returns what the norm of gradients takes there, of units that are ``resident`` and of root parameters.

        ``torch._foreach_norm`` gives each tensor's a block, behind sums of ``_CHUNK`` elements of each. With it go the
        ends of root gradients' blocks.
        """
        if self.is_host:
            return 0
        if (key := frozenset(resident)) not in self._squares:
            found = self._gradients_there(key)
            sums = 4 * len(found) * -(-max((unit.counts[index] for unit, index in found), default=0) // _CHUNK)
            stay = {self._all[number] for number in key}
            ends = sum(-unit.layout.sizes[index] % self.block_bytes for unit, index in found if unit not in stay)
            self._squares[key] = self.block_bytes * (len(found) + 2) + sums + ends
        return self._squares[key]

    def _gradients_there(self, resident: frozenset[int]) -> list[tuple[Unit, int]]:
        """Returns the gradients that are there in a step, by unit and index: of resident units, and the root's."""
        root = range(len(self.units.layers), len(self._all))
        units = (self._all[number] for number in sorted(resident.union(root)))
        return [(unit, index) for unit in units for index in unit.gradients.indices]

    def adding_bytes(self, resident: Collection[int]) -> tuple[int, int]:
        """Returns what sums of several gradients take there beside their bytes, and what adding one takes meanwhile.

        That is of units that are ``resident`` and of root parameters. Each sum's squares have a block.
        """
        if self.is_host or not self._accumulates:
            return 0, 0
        if (key := frozenset(resident)) not in self._adding:
            sums = self._gradients_there(key)
            blocks = sum(-unit.gradients.sum_bytes() % self.block_bytes for unit in {unit for unit, _ in sums})
            halves = [unit.counts[index] for unit, index in sums if unit.dtypes[index] == torch.bfloat16]
            scratch = max(map(add_scratch_bytes, halves), default=0)
            self._adding[key] = self.block_bytes * len(sums) + blocks, scratch
        return self._adding[key]

    def scratch(self, choice: Choice, numbers: frozenset[int], device_type: str) -> int:
        """Returns what updates of the units of these numbers take on the device while they run."""
        if self.is_host:
            return 0
        key = "fp32" if choice.states == MUON else choice.states, device_type
        if key not in self._scratch:
            self._scratch[key] = self._scratch_by_unit(*key)
        if (asked := (*key, numbers)) not in self._most_scratch:
            of_unit = self._scratch[key]
            self._most_scratch[asked] = max((of_unit[number] for number in numbers), default=0)
        return self._most_scratch[asked]

    @cached_property
    def muon(self) -> list[MuonUnit]:
        """What Muon updates of each unit; nothing where the optimizer is AdamW."""
        return muon_units(self.units) if self._by_muon else [MuonUnit(unit, ()) for unit in self._all]

    def iterations_bytes(self, resident: Collection[int]) -> tuple[int, int]:
        """Returns what Muon's iterations take on the device: beside updates on the host, and of resident units."""
        if not self._by_muon:
            return 0, 0
        beside = [one.iteration_bytes for number, one in enumerate(self.muon) if number not in resident]
        there = [self.muon[number] for number in resident if self.muon[number].indices]
        return max(beside, default=0), max((one.iteration_bytes + one.directions_bytes for one in there), default=0)

    def _scratch_by_unit(self, states: str, device_type: str) -> list[int]:
        return [
            max(
                (
                    scratch_bytes(parameter.numel(), device_type, dtype=dtype, states=states)
                    for parameter, dtype in zip(unit.parameters, unit.dtypes, strict=True)
                    if parameter.requires_grad
                ),
                default=0,
            )
            for unit in self._all
        ]

    def taken(self, choice: Choice, placed: Placed) -> StepBytes:
        """Returns what that takes; where all is in RAM, by what it takes with a window of one."""
        if choice.store != "ram":
            return self._taken(choice, placed)
        key = choice.states, choice.update, placed.resident
        if key not in self._taken_by_one:
            self._taken_by_one[key] = self._taken(choice, replace(placed, window=1))
        slots, _, _ = device_bytes(self.of(choice), placed.window, placed.resident, BUFFERS)
        return replace(self._taken_by_one[key], slots=slots)

    def _taken(self, choice: Choice, placed: Placed) -> StepBytes:
        return step_bytes(
            self.of(choice),
            placed,
            BUFFERS,
            states=choice.states,
            in_backward=choice.update == "in_backward",
            replicas=self.replicas,
        )
