"""The root's units as they are in the model: whose they are, and the versions by which autograd knows them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stronghold.engine.hooks import Hooks
from stronghold.engine.members import Members, check_held
from stronghold.engine.model_units import Owner
from stronghold.unit import Unit, check_not_swapped


class Root:
    """The units of root parameters, and what of the model is outside of its layers.

    Parameters that were views of one memory share a version: of all ``units`` only those are asked for theirs that
    share one with the root.
    """

    def __init__(self, hooks: Hooks, units: Sequence[Unit]) -> None:
        self._hooks = hooks
        self._units: list[tuple[Unit, list[tuple[weakref.ref[nn.Module], str]]]] = []
        self._versioned = [*units]
        self.outside = Members(())

    def add(self, root: Iterable[tuple[Unit, Sequence[Owner]]]) -> None:
        """Adds units of the root with the modules that own their parameters."""
        added = [(unit, [(weakref.ref(module), name) for module, name in owners]) for unit, owners in root]
        self._units += added
        for unit, _ in added:
            self._hooks.on_root(unit)
            if unit not in self._versioned:  # the forward pass under way may have used it already
                self._versioned.append(unit)

    def find_versions(self) -> None:
        """Finds out which units share versions with the root, by counting a write of it."""
        self._versioned = self.count_version(unit for unit, _ in self._units)

    def look_at(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Notes the modules of ``model`` that are in none of its ``layers`` as what has to be there from now on."""
        within = {id(inner) for module in layers for inner in module.modules()}
        self.outside = Members((name, module) for name, module in model.named_modules() if id(module) not in within)

    def same(self) -> bool:
        """Whether the root is what it was; raises OffloadedModelError where a parameter was replaced."""
        for unit, owners in self._units:
            check_not_swapped(unit.name, unit.parameters)
            self._hooks.on_root(unit)
            there = ((module(), name) for module, name in owners)
            check_held(unit.name, ((module, name, unit.parameters[0]) for module, name in there if module is not None))
        return self.outside.same()

    def count_version(self, root: Iterable[Unit]) -> list[Unit]:
        """Counts a write of root parameters, which is not the user's; returns whose versions that has changed."""
        before = {unit: unit.versions_now() for unit in self._versioned}
        torch.autograd.graph.increment_version([parameter for unit in root for parameter in unit.parameters])
        changed = [unit for unit in self._versioned if unit.versions_now() != before[unit]]
        for unit in (unit for unit in changed if before[unit] == unit.versions):  # of others the user has written some
            for index in range(len(unit.parameters)):
                unit.attach(index)
        return changed
