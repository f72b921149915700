"""What ``stronghold.Muon`` takes of a model: which matrices are its own, their bytes, and the device's iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from stronghold.engine.model_units import ModelUnits
from stronghold.layout import lay_out
from stronghold.optim.muon_groups import MUON_DEFAULTS
from stronghold.optim.muon_step import PART, newton_schulz_bytes
from stronghold.optim.states import lay_out_moments, lay_out_momentum
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import update_form
from stronghold.planner.model_bytes import UnitBytes
from stronghold.planner.op_costs import Op
from stronghold.planner.step_bytes import MUON
from stronghold.unit import Unit

_PART_BYTES = 24
"""Of an element that is worked on on the device: its gradient in fp32, scaled, moved on, and a momentum to choose."""


@dataclass(frozen=True)
class MuonUnit:
    """The matrices of one unit that Muon updates: their indices and shapes."""

    unit: Unit
    indices: Sequence[int]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.unit.shapes[index]) for index in self.indices]

    @cached_property
    def directions_bytes(self) -> int:
        """What their directions take together, in bf16."""
        own = frozenset(self.indices)
        return lay_out([2 * count * (index in own) for index, count in enumerate(self.unit.counts)]).total_bytes

    @cached_property
    def iteration_bytes(self) -> int:
        """What the iteration of the largest one takes on the device."""
        return max(map(newton_schulz_bytes, self.shapes), default=0)

    @cached_property
    def part_bytes(self) -> int:
        """What of a matrix is worked on at a time takes there, where the unit is resident."""
        return _PART_BYTES * min(PART, max((self.unit.counts[index] for index in self.indices), default=0))

    def counted(self, own: UnitBytes) -> UnitBytes:
        """Returns the unit's bytes with Muon's momentum, and AdamW's moments of what Muon does not update."""
        trained = self.unit.gradients.indices
        pairs = lay_out_moments(self.unit, [i for i in trained if i not in self.indices], "fp32").total_bytes
        moments = {**own.moments, MUON: pairs + lay_out_momentum(self.unit, self.indices).total_bytes}
        return replace(own, moments=moments, moments_apart=pairs, directions=self.directions_bytes)

    @cached_property
    def iterations(self) -> Counter[Op]:
        """Returns what the device computes for all of them: five steps each, as by default."""
        found = Counter[Op]()
        for shape in self.shapes:
            short, long = min(shape), max(shape)
            products = [(short, short, long), (short, short, short), (short, long, short)]
            for m, n, k in products:
                sizes, moved = (1, m, n, k), 2 * (m * k + k * n + m * n)
                found[Op("matmul", "bfloat16", sizes, 2 * m * n * k, moved)] += MUON_DEFAULTS["ns_steps"]  # type: ignore[operator]
            # Its norm is read, it is divided by that, and copied.
            found[Op("other", "bfloat16", (), 0, 2 * 5 * short * long)] += 1
        return found


def muon_units(units: ModelUnits) -> list[MuonUnit]:
    """Returns, for each unit, layers first and the root behind them, the matrices that Muon updates in a plan.

    They are the trained matrices within the layers that are no embedding's: the rest is AdamW's.
    """
    embeddings = {
        id(module.weight)
        for layer in units.modules
        for module in layer.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    within = {id(unit) for unit in [*units.layers, *units.beside.values()]}

    def own(unit: Unit) -> list[int]:
        if id(unit) not in within:
            return []
        matrices = (i for i in unit.gradients.indices if len(unit.shapes[i]) == 2 and unit.counts[i])
        return [index for index in matrices if id(unit.parameters[index]) not in embeddings]

    return [MuonUnit(unit, own(unit)) for unit in [*units.layers, *(unit for unit, _ in units.root)]]


def muon_assumed(machine: MachineFile, dtype: str) -> list[str]:
    """Returns what a plan for Muon rests on, in words."""
    found = ["Muon updates the matrices of the layers, in five steps of its iteration each, and AdamW all else"]
    if update_form(machine, dtype, MUON) != f"{dtype}+{MUON}":
        found.append("an update by Muon takes the host as long as AdamW's, whose bytes are as many")
    if not any(product.dtype == "bfloat16" for product in machine.matmul):
        found.append("products in bfloat16, which were not measured, take as long as the model's")
    return found
