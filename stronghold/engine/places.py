"""Where the modules of a layer keep buffers and attributes between its runs, and what is found there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from stronghold.engine.copying import is_generator
from stronghold.engine.held_values import ATOMIC, CONTAINERS, items_of
from stronghold.engine.traces import OF_EVERY_MODULE, version_of
from stronghold.errors import OffloadedModelError

ABSENT = object()
"""Stands for the value of what is not there."""
Found = tuple["ModulePlace", dict[str, Any], list[tuple[str, Any, Any, int]]]
"""A place, its values that nothing can change, and others with their copies and versions."""


class Quiet(NamedTuple):
    """What is at a place that has values alone which nothing can change: by name, and all names, nn.Module's with them.

    Most places of most layers are so in every step: to find that a place still is takes two comparisons.
    """

    atoms: dict[str, Any]
    names: frozenset[str]

    def is_at(self, names: dict[str, Any]) -> bool:
        """Whether nothing else is at a place now, which has these ``names``."""
        return names.keys() == self.names and all(map(is_, map(names.get, self.atoms), self.atoms.values()))


class ModulePlaces:
    """The places of a layer's modules, to which it refers weakly."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.modules = [weakref.ref(m) for m in module.modules()]
        self._all = [ModulePlace(reference, kind) for reference in self.modules for kind in ("buffer", "attribute")]
        self._quiet: list[Quiet | None] = [None] * len(self._all)
        """What was found last at those that were quiet then."""

    def found(self, generator: Callable[[Any], Any]) -> tuple[list[tuple[ModulePlace, Quiet]], list[Found]]:
        """Returns what is there now: where it is quiet, and elsewhere, copied; ``generator`` copies generators."""
        quiet, others = [], []
        for number, (place, known) in enumerate(zip(self._all, self._quiet, strict=True)):
            names = place.names()
            if known is None or not known.is_at(names):
                atoms, more = _sorted(place, names, generator)
                known = None if more else Quiet(atoms, frozenset(names))
                self._quiet[number] = known
                if known is None:
                    others.append((place, atoms, more))
                    continue
            quiet.append((place, known))
        places = [ModulePlace(weakref.ref(value), "object") for value in _objects_in(others)]
        others += [(place, *_sorted(place, place.names(), generator)) for place in places]
        return quiet, others


@dataclass(frozen=True, eq=False)
class ModulePlace:
    """Where a module keeps its buffers, or its plain attributes, by name; or an object in one of these, its own."""

    owner: weakref.ref[Any]
    kind: Literal["buffer", "attribute", "object"]

    def names(self) -> dict[str, Any]:
        owner = self.owner()
        if owner is None:  # it has been replaced since
            return {}
        return owner._buffers if self.kind == "buffer" else vars(owner)

    @property
    def left_out(self) -> frozenset[str]:
        return _LEFT_OUT if self.kind == "attribute" else _NONE

    def copied(self, value: Any, generator: Callable[[Any], Any]) -> Any:
        return value if self.kind == "object" and isinstance(value, Tensor) else copy_of(value, generator)

    def version(self, value: Any) -> int:
        return version_of(value) if isinstance(value, Tensor) and self.kind != "object" else 0

    def versions(self, value: Any) -> list[int]:
        return [] if self.kind == "object" else _versions(value)

    def differs(self, now: Any, value: Any, copy: Any, version: int) -> bool:
        if now is not value:
            return True
        if isinstance(now, Tensor):
            return not now.requires_grad and self.version(now) != version
        if type(now) in CONTAINERS:
            return not same_items(now, copy)
        return is_generator(now)  # whether it has drawn takes longer to see than to put it back

    def is_written_unseen(self, name: str, value: Any) -> bool:
        """Whether a value may be written in ways that no version counts: caches, which are large, are not."""
        if not isinstance(value, Tensor) or value.requires_grad or self.kind == "object":
            return False
        module = self.owner()
        is_state = self.kind == "buffer" and module is not None and name not in module._non_persistent_buffers_set
        return value.ndim == 1 or (is_state and value.is_floating_point())

    def refusal(self, name: str, what: str) -> OffloadedModelError:
        return OffloadedModelError(
            "a layer runs again in the backward pass, and must find what it found in the forward pass (the "
            f"{'buffer' if self.kind == 'buffer' else 'attribute'} {name} of a {type(self.owner()).__name__} has been "
            f"{what} in between); change it after backward(), or use offload(..., activations='keep')"
        )


_LEFT_OUT = OF_EVERY_MODULE | {"forward", "_apply", "_replicate_for_data_parallel", "compile"}
_NONE: frozenset[str] = frozenset()


def _sorted(
    place: ModulePlace, names: dict[str, Any], generator: Callable[[Any], Any]
) -> tuple[dict[str, Any], list[tuple[str, Any, Any, int]]]:
    """Returns what is at a place: values that nothing can change, and others with their copies and versions."""
    atoms: dict[str, Any] = {}
    others = []
    for name in names.keys() - place.left_out:
        value = names[name]
        if type(value) in ATOMIC:
            atoms[name] = value
        else:
            others.append((name, value, place.copied(value, generator), place.version(value)))
    return atoms, others


def _objects_in(places: Iterable[Found]) -> Iterable[Any]:
    """Returns the objects of classes written in Python that are values at ``places``, each once."""
    return {id(value): value for _, _, others in places for _, value, _, _ in others if _has_attributes(value)}.values()


def _has_attributes(value: Any) -> bool:
    kind = type(value)
    if (known := _WITH_ATTRIBUTES.get(kind)) is None:
        _WITH_ATTRIBUTES[kind] = known = not (
            kind.__module__ == "builtins"
            or not kind.__dictoffset__
            or not kind.__weakrefoffset__
            or issubclass(kind, (Tensor, nn.Module, type, Enum))
            or is_generator(value)
            # All modules of a model have its configuration, which may name thousands of labels and is not written.
            or any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)
        )
    return known


_WITH_ATTRIBUTES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def copy_of(value: Any, generator: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if type(value) in CONTAINERS:
        return value.copy()
    return generator(value) if is_generator(value) else value


def same_items(one: Any, other: Any) -> bool:
    items, others = items_of(one), items_of(other)
    return len(items) == len(others) and all(map(is_, items, others))


def _versions(value: Any) -> list[int]:
    """Returns the versions of a tensor, or of those in a container; a frozen parameter's are not the user's alone."""
    if isinstance(value, Tensor):
        return [version_of(value)]
    items = items_of(value)
    return [version_of(item) for item in items if type(item) is Tensor] if Tensor in set(map(type, items)) else []
