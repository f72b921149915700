"""What a layer's second run needs to be its first run again: arguments, buffers, attributes and what is trained."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stronghold.engine.copying import generator_copy, is_generator
from stronghold.engine.held_values import (
    ATOMIC,
    CONTAINERS,
    GraphItems,
    GraphValue,
    KeptItems,
    Reference,
    held_value,
    items_of,
    without_graph,
)
from stronghold.engine.traces import OF_EVERY_MODULE, version_of
from stronghold.errors import OffloadedModelError


class State:
    """What a layer's modules keep between runs, as it was before the first run, whatever changes it then.

    That is buffers and plain attributes: ``training``, a count, what a mask is made from. A change shows by the
    object's identity, in a list, queue, dictionary or set by its items', in a tensor by its version. ``batch_norm``,
    ``.data`` and kernels that write through pointers leave no trace in a version, and to look would be to wait for the
    device: of tensors with one dimension, and of buffers of floating point that ``state_dict()`` has, a change is
    always taken for granted, as it is of generators of random numbers. Of an object of another kind that is the value
    of an attribute, its own attributes are put back as well, such as a count; not what is written into its tensors, of
    which it may hold many, nor what is in objects in it.

    It refers to the modules weakly, and to all that may refer to them, for autograd's graph holds it, and a module may
    hold that. ``generator`` copies generators of random numbers, which the arguments may hold as well.
    """

    def __init__(self, module: nn.Module, generator: Callable[[Any], Any] = generator_copy) -> None:
        places = [_Names(weakref.ref(m), kind) for m in module.modules() for kind in ("buffer", "attribute")]
        self._before = [(place, *_sorted(place, generator)) for place in places]
        self._before += [(place, *_sorted(place, generator)) for place in _objects_in(self._before)]
        self._changed: list[tuple[_Names, str, Any]] = []
        self._module = weakref.ref(module)
        self._left: list[tuple[_Names, dict[str, Any], list[tuple[str, Any, Any]]]] = []
        """What the first run left alone: values that nothing can change, and others with their versions."""

    def ran(self) -> None:
        """Forgets the copies of what the first run left alone."""
        for place, atoms, others in self._before:
            names, left = place.names(), []
            added = names.keys() - place.left_out - atoms.keys()
            for name, value in _differing(atoms, names):
                self._changed.append((place, name, value))
                del atoms[name]
            for name, value, copy, version in others:
                added.discard(name)
                now = names.get(name, _ABSENT)
                if place.differs(now, value, copy, version) or place.is_written_unseen(name, now):
                    if _has_graph(copy):
                        copy = without_graph(copy, self._is_over_weights) or _LEFT
                    self._changed.append((place, name, copy))
                elif not _has_graph(value):
                    held = held_value(value)
                    if place.kind != "object" or type(held) is not Reference:  # no objects in objects
                        left.append((name, held, place.versions(value)))
                elif not isinstance(value, Tensor):  # who else adds to it leaves no trace
                    if items := without_graph(value, self._is_over_weights):
                        self._changed.append((place, name, items))
                elif type(value) is Tensor and place.version(value) == version:  # the layer adds to others
                    left.append((name, GraphValue(value), place.versions(value)))
            self._changed += [(place, name, _ABSENT) for name in added]
            self._left.append((place, atoms, left))
        self._before.clear()

    def _is_over_weights(self, tensor: Tensor) -> bool:
        module = self._module()
        if module is None or not tensor._is_view():
            return False
        there = tensor.untyped_storage().data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.untyped_storage().data_ptr() == there for parameter in module.parameters())

    @contextmanager
    def again(self, generator: Callable[[Any], Any] = generator_copy) -> Iterator[None]:
        """Runs the block with everything as before the first run; what it does to it is forgotten.

        Raises OffloadedModelError where the user has changed, since that run, what cannot be put back.
        """
        changed = [(place, place.names(), name, copy) for place, name, copy in [*self._changed, *self._changed_since()]]
        present = [(names, name, names.get(name, _ABSENT)) for _, names, name, _ in changed]
        for place, names, name, copy in changed:
            if isinstance(copy, (GraphItems, GraphValue)):
                _put(names, name, copy.again())
            elif copy is not _LEFT:
                _put(names, name, place.copied(copy, generator))
        try:
            yield
        finally:
            for names, name, value in present:
                _put(names, name, value)

    def _changed_since(self) -> Iterator[tuple[_Names, str, Any]]:
        for place, atoms, left in self._left:
            names = place.names()
            yield from ((place, name, value) for name, value in _differing(atoms, names))
            for name, held, versions in left:
                now = names.get(name, _ABSENT)
                if type(held) is GraphValue:
                    if not held.is_copy and versions != place.versions(held.values):
                        raise place.refusal(name, "written")
                    if held.is_copy or now is None or held.whose() is not now:
                        yield place, name, held.again()
                    continue
                if type(held) is Reference:
                    if not held.is_of(now):
                        if (now := held.weak and held.weak()) is None:
                            raise place.refusal(name, "replaced")
                        yield place, name, now
                    if not held.has_items(now):
                        raise place.refusal(name, "written")
                    continue
                value, copy = held if type(held) is KeptItems else (held, held)
                if versions != place.versions(copy):
                    raise place.refusal(name, "written")
                if now is not value or not _same_items(now, copy):
                    yield place, name, copy


@dataclass(frozen=True, eq=False)
class _Names:
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
        return value if self.kind == "object" and isinstance(value, Tensor) else _copy(value, generator)

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
            return not _same_items(now, copy)
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


def _objects_in(places: Iterable[tuple[_Names, dict[str, Any], list[tuple[str, Any, Any, int]]]]) -> list[_Names]:
    """Returns the objects of classes written in Python that are values at ``places``, each once."""
    found = {id(value): value for _, _, others in places for _, value, _, _ in others if _has_attributes(value)}
    return [_Names(weakref.ref(value), "object") for value in found.values()]


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


_LEFT_OUT = OF_EVERY_MODULE | {"forward", "_apply", "_replicate_for_data_parallel", "compile"}
_NONE: frozenset[str] = frozenset()
_ABSENT = object()
_LEFT = object()
"""Stands for what holds a graph and cannot be held without it: that would be the graph of every step before."""


def _copy(value: Any, generator: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if type(value) in CONTAINERS:
        return value.copy()
    return generator(value) if is_generator(value) else value


def _same_items(one: Any, other: Any) -> bool:
    items, others = items_of(one), items_of(other)
    return len(items) == len(others) and all(map(is_, items, others))


def _versions(value: Any) -> list[int]:
    """Returns the versions of a tensor, or of those in a container; a frozen parameter's are not the user's alone."""
    if isinstance(value, Tensor):
        return [version_of(value)]
    items = items_of(value)
    return [version_of(item) for item in items if type(item) is Tensor] if Tensor in set(map(type, items)) else []


def _sorted(place: _Names, generator: Callable[[Any], Any]) -> tuple[dict[str, Any], list[tuple[str, Any, Any, int]]]:
    """Returns what is at a place: values that nothing can change, and others with their copies and versions."""
    atoms: dict[str, Any] = {}
    others = []
    names = place.names()
    for name in names.keys() - place.left_out:
        value = names[name]
        if type(value) in ATOMIC:
            atoms[name] = value
        else:
            others.append((name, value, place.copied(value, generator), place.version(value)))
    return atoms, others


def _differing(atoms: dict[str, Any], names: dict[str, Any]) -> list[tuple[str, Any]]:
    if atoms.items() <= names.items():
        return []
    return [(name, value) for name, value in atoms.items() if names.get(name, _ABSENT) is not value]


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, partial):
        return _has_graph([*value.args, *value.keywords.values()])
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set, deque)) else ()
    return not ATOMIC.issuperset(map(type, items)) and any(map(_has_graph, items))


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    else:
        names[name] = value


@contextmanager
def requiring_grad(parameters: Iterable[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """Runs the block with ``requires_grad`` of each parameter as given, as autograd's graph of the first run has it."""
    with torch._C.DisableTorchFunctionSubclass():
        changed = [(parameter, before) for parameter, before in parameters if parameter.requires_grad != before]
        for parameter, before in changed:
            parameter.requires_grad_(before)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, before in changed:
                parameter.requires_grad_(not before)
