"""What a layer's second run needs to be its first run again: arguments, buffers, attributes and what is trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.copying import generator_copy
from stronghold.engine.held_values import (
    ATOMIC,
    GraphItems,
    GraphValue,
    KeptItems,
    Reference,
    held_value,
    without_graph,
)
from stronghold.engine.places import ABSENT, ModulePlace, ModulePlaces, same_items


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

    def __init__(self, places: ModulePlaces, generator: Callable[[Any], Any] = generator_copy) -> None:
        self._quiet, self._before = places.found(generator)
        self._changed: list[tuple[ModulePlace, str, Any]] = []
        self._module = places.module
        self._left: list[tuple[ModulePlace, dict[str, Any], list[tuple[str, Any, Any]]]] = []
        """What the first run left alone: values that nothing can change, and others with their versions."""

    def ran(self) -> None:
        """Forgets the copies of what the first run left alone."""
        quiet = []
        for place, known in self._quiet:
            if known.is_at(place.names()):
                quiet.append((place, known))
            else:
                self._before.append((place, {**known.atoms}, []))
        self._quiet = quiet
        for place, atoms, others in self._before:
            names, left = place.names(), []
            added = names.keys() - place.left_out - atoms.keys()
            for name, value in _differing(atoms, names):
                self._changed.append((place, name, value))
                del atoms[name]
            for name, value, copy, version in others:
                added.discard(name)
                now = names.get(name, ABSENT)
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
            self._changed += [(place, name, ABSENT) for name in added]
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
        present = [(names, name, names.get(name, ABSENT)) for _, names, name, _ in changed]
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

    def _changed_since(self) -> Iterator[tuple[ModulePlace, str, Any]]:
        for place, known in self._quiet:
            names = place.names()
            if not known.is_at(names):
                yield from ((place, name, value) for name, value in _differing(known.atoms, names))
        for place, atoms, left in self._left:
            names = place.names()
            yield from ((place, name, value) for name, value in _differing(atoms, names))
            for name, held, versions in left:
                now = names.get(name, ABSENT)
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
                if now is not value or not same_items(now, copy):
                    yield place, name, copy


_LEFT = object()
"""Stands for what holds a graph and cannot be held without it: that would be the graph of every step before."""


def _differing(atoms: dict[str, Any], names: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in atoms.items() if names.get(name, ABSENT) is not value]


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, partial):
        return _has_graph([*value.args, *value.keywords.values()])
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set, deque)) else ()
    return not ATOMIC.issuperset(map(type, items)) and any(map(_has_graph, items))


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
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
