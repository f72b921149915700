"""What a model is made of, in bytes: its units, and how many of each kind are on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Part = Literal["weights", "remainders", "moments"]


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """What the parts of one unit take, wherever they are.

    ``slot`` is what its weights take in a slot of the window, ``gradients`` what those of its trained parameters take
    with their squares, and ``gradient_slot`` the same on the device on their way down. ``moments`` are the optimizer's
    by the name of their format: of Muon's, AdamW's ``moments_apart`` are in a buffer of their own. ``directions`` are
    what Muon's of the unit's matrices take of the host while it is updated. ``on_device`` is what a root parameter that
    is not resident takes there: its copy, and its gradient until that is on the host; ``root_gradient`` what autograd
    holds of that. ``is_copied`` tells that its copy is apart from its host memory, ``is_shared`` that another process
    has the parameter, too: all of them update it on the host. ``sums`` are the low halves of gradients that are added
    up over several passes, where these are, and of a copied root parameter on the device, too.
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
    is_shared: bool = False
    on_device: int = 0
    root_gradient: int = 0
    sums: int = 0

    @property
    def trained(self) -> bool:
        return self.gradients > 0

    def resident(self, states: str = "fp32", *, in_backward: bool = False) -> int:
        """Returns what the unit takes on the device if it is resident, its gradients and moments with it.

        A layer that is updated ``in_backward``, by one process, has no gradients between steps.
        """
        gradients = 0 if in_backward and not self.is_root else self.gradients + self.sums
        return self.weights + self.remainders + gradients + self.moments.get(states, 0)

    @property
    def beside(self) -> int:
        """What there is of the unit on the device, beside its copy there, if it is not resident."""
        return self.sums if self.is_root and self.is_copied else 0

    def part(self, name: Part, states: str) -> int:
        return (
            self.moments.get(states, 0) if name == "moments" else self.weights if name == "weights" else self.remainders
        )


class Counted(NamedTuple):
    """Units that are alike: one of them, and how many of them are ``resident``, and how many are not."""

    unit: UnitBytes
    resident: int
    streamed: int


class Streamed(NamedTuple):
    """Of a model of which some units are resident: how many ``layers`` are not, and the longest ``slot`` of one.

    ``root`` is what root parameters take on the device that are not, ``resident`` what those units do that are, with
    moments in fp32, and what there is beside of those that are not.
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
    def _kinds(self) -> tuple[list[UnitBytes], list[int]]:
        """One unit of each kind, layers and root parameters apart, and for each unit the number of its kind."""
        first, kinds, kind_of = dict[tuple[object, ...], int](), list[UnitBytes](), list[int]()
        known: dict[tuple[int, bool], int] = {}  # often they are the same object
        for number, unit in enumerate(self.units):
            same = id(unit), number < len(self.layers)
            if same not in known:
                fields = {**vars(unit), "moments": frozenset(unit.moments.items())}
                known[same] = first.setdefault((same[1], *fields.values()), len(kinds))
                if known[same] == len(kinds):
                    kinds.append(unit)
            kind_of.append(known[same])
        return kinds, kind_of

    def kind_of(self, number: int) -> int:
        """Returns the number of the kind of a unit: of units that take the same, layers or root parameters."""
        return self._kinds[1][number]

    @cached_property
    def _count_of_kinds(self) -> Counter[int]:
        return Counter(self._kinds[1])

    @cached_property
    def _counted(self) -> dict[frozenset[int], list[Counted]]:
        return {}

    @cached_property
    def _streamed(self) -> dict[frozenset[int], Streamed]:
        return {}

    def counted(self, resident: Collection[int]) -> list[Counted]:
        """Returns the kinds of units with how many are ``resident``, and how many are not."""
        key = frozenset(resident)
        if key not in self._counted:
            kinds, kind_of = self._kinds
            every, there = self._count_of_kinds, Counter(map(kind_of.__getitem__, key))
            self._counted[key] = [
                Counted(unit, there[kind], every[kind] - there[kind]) for kind, unit in enumerate(kinds)
            ]
        return self._counted[key]

    def streamed(self, resident: Collection[int]) -> Streamed:
        """Returns what there is to know of the units that are not ``resident``, which a search asks again and again."""
        key = frozenset(resident)
        if key not in self._streamed:
            counted = self.counted(key)
            layers = [one for one in counted if one.streamed and not one.unit.is_root]
            self._streamed[key] = Streamed(
                layers=sum(one.streamed for one in layers),
                slot=max((one.unit.slot for one in layers), default=0),
                gradient_slot=max((one.unit.gradient_slot for one in layers), default=0),
                root=sum(one.streamed * one.unit.on_device for one in counted if one.unit.is_root),
                resident=sum(one.resident * one.unit.resident() + one.streamed * one.unit.beside for one in counted),
            )
        return self._streamed[key]

    @cached_property
    def _joined(self) -> dict[tuple[frozenset[int], tuple[int, ...]], frozenset[int]]:
        return {}

    def joined(self, resident: frozenset[int], others: Sequence[int]) -> frozenset[int]:
        """Returns the units of both, the same set for the same ones: what is known by sets is then found at once."""
        key = resident, tuple(others)
        if key not in self._joined:
            self._joined[key] = resident.union(others)
        return self._joined[key]
