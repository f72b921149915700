"""Muon's groups and states beside AdamW's, over the parameters of an offloaded model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Buffer, Device
from stronghold.layout import Layout, lay_out
from stronghold.optim.change import Change
from stronghold.optim.groups import check_group
from stronghold.optim.host_adamw import HostAdamW
from stronghold.optim.muon_change import MuonChange
from stronghold.optim.muon_groups import ADAMW_DEFAULTS, MUON_DEFAULTS, check_muon_group, is_muon
from stronghold.optim.muon_step import newton_schulz_bytes
from stronghold.optim.states import Moments
from stronghold.unit import HostGrad, Unit


class HostMuon(HostAdamW):
    """Says what a step of :class:`stronghold.Muon` updates, and has its states; carries nothing out.

    A group with ``use_muon=False`` is AdamW's, and has the defaults of ``torch.optim.AdamW``.
    """

    called = "Muon"
    _device: Device | None = None
    _directions: Buffer | None = None
    """Host memory for the directions of one unit's matrices, as units are updated one after the other."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._kinds: list[bool] = []
        """Whether each group is Muon's, as it was added."""
        self._rooms: dict[Unit, dict[int, int]] = {}
        """Where in there the direction of each of a unit's matrices begins, in bytes."""
        super().__init__(*args, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; ``use_muon`` says whether it is Muon's, which it is by default.

        Its parameters must belong to the offloaded model of the others.
        """
        by_muon = param_group.get("use_muon", True)
        if not isinstance(by_muon, bool):
            raise ValueError(f"use_muon must be True or False (got {by_muon!r})")
        own, others = (self.defaults, ADAMW_DEFAULTS) if by_muon else (ADAMW_DEFAULTS, MUON_DEFAULTS)
        foreign = sorted(others.keys() - own.keys())
        if given := [name for name in foreign if name in param_group]:
            raise ValueError(
                f"a group with use_muon={by_muon} is updated by {'Muon' if by_muon else 'AdamW'}, which has no "
                f"{given[0]} (got {param_group[given[0]]!r}); leave it out, or pass use_muon={not by_muon}"
            )
        super().add_param_group({**own, **param_group, "use_muon": by_muon})
        for name in foreign:  # which torch has put in from the defaults
            self.param_groups[-1].pop(name, None)
        self._kinds.append(by_muon)

    def check_group(self, group: Mapping[str, Any]) -> None:
        (check_muon_group if group.get("use_muon", True) else check_group)(group)

    def check_settings(self, *, once: bool = False) -> None:
        if (kinds := [is_muon(group) for group in self.param_groups]) != self._kinds:
            raise ValueError(
                f"use_muon of a group cannot change, for its states are another optimizer's (got {kinds} for groups "
                f"that were added as {self._kinds}); build the optimizer anew"
            )
        if any("momentum" in group for group, by_muon in zip(self.param_groups, kinds, strict=True) if not by_muon):
            raise ValueError(
                "a group with use_muon=False has betas and no momentum (got a momentum in one, as of a scheduler that "
                "cycles it); take it out, del group['momentum'], and pass cycle_momentum=False to CyclicLR or "
                "OneCycleLR, or update these parameters by an optimizer of their own, stronghold.AdamW"
            )
        super().check_settings(once=once)

    def groups_from(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        groups = super().groups_from(saved_groups)
        found = [{**group, "use_muon": kind} for group, kind in zip(groups, self._kinds, strict=True)]
        for group in (group for group in found if not group["use_muon"]):
            group.pop("momentum", None)  # a scheduler that cycles it has put it there
        return found

    def forget(self) -> None:
        super().forget()
        self._directions = None
        self._rooms.clear()

    def reserve(self, units: Sequence[Unit], device: Device, *, sums_gradients: bool, adds: bool = False) -> None:
        self._device = device
        self._make_room(units)
        super().reserve(units, device, sums_gradients=sums_gradients, adds=adds)

    def change(self, unit: Unit, index: int, gradient: HostGrad) -> Change:
        if not self.by_muon(unit, index):
            return super().change(unit, index, gradient)
        group, state = self.group_of(unit, index), self.state_of(unit, index)
        return MuonChange.of(index, gradient, state, group, None if unit.resident else self._room(unit, index))

    def by_muon(self, unit: Unit, index: int) -> bool:
        """Whether a parameter is in one of Muon's groups."""
        return self.updates(unit, index) and is_muon(self.group_of(unit, index))

    def scratch_bytes(self) -> int:
        beside, resident = 0, 0
        for unit in self._units:
            shapes = [unit.shapes[index] for index in self._matrices(unit)]
            iteration = max(map(newton_schulz_bytes, shapes), default=0)
            if unit.resident:
                resident = max(resident, iteration + self._lay_out(unit, self._matrices(unit)).total_bytes)
            else:
                beside = max(beside, iteration)
        return beside + resident

    def _room(self, unit: Unit, index: int) -> Tensor:
        """Returns the host's memory for the direction of one matrix, bf16."""
        if index not in self._rooms.get(unit, {}):  # it was frozen when room was made, and may be again
            self._make_room([unit], frozenset([index]))
        assert self._directions is not None
        return self._directions.view(self._rooms[unit][index], unit.shapes[index], torch.bfloat16)

    def _make_room(self, units: Sequence[Unit], more: frozenset[int] = frozenset()) -> None:
        """Allocates memory for the directions of any one of ``units``, of those at ``more`` too.

        Raises BudgetError where it does not fit; nothing has changed then.
        """
        needed, rooms = 0, {}
        for unit in units:
            # What has room keeps it: in the same update its place may be in use.
            matrices = self._matrices(unit) | self._rooms.get(unit, {}).keys() | more
            layout = self._lay_out(unit, matrices)
            rooms[unit] = {index: layout.offsets[index] for index in matrices}
            needed = max(needed, 0 if unit.resident else layout.total_bytes)
        self._grow(units[0], needed)
        self._rooms.update(rooms)

    def _grow(self, unit: Unit, needed: int) -> None:
        have = 0 if self._directions is None else self._directions.length_bytes
        if needed <= have:
            return
        assert self._device is not None
        unit.memory.check_memory(host_bytes=needed - have, device_bytes=self.scratch_bytes(), what="Muon's iteration")
        memory = unit.replicas.memory(needed)
        self._directions = self._device.host_buffer(needed, private=True, memory=memory)

    def _lay_out(self, unit: Unit, matrices: Collection[int]) -> Layout:
        return lay_out([2 * count * (index in matrices) for index, count in enumerate(unit.counts)])

    def _matrices(self, unit: Unit) -> frozenset[int]:
        """Returns which of a unit's parameters Muon updates."""
        return frozenset(index for index in self._trained(unit) if self.by_muon(unit, index))

    def _no_moments(self) -> Moments:
        return Moments(self.states, self.by_muon)
