"""What a layer's second run needs to be its first run again: arguments, buffers, attributes and what is trained."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stronghold.engine.copying import generator_copy, is_generator
from stronghold.errors import OffloadedModelError


class State:
    """What a layer's modules keep between runs, as it was before the first run, whatever changes it then.

    That is buffers and plain attributes: ``training``, a count, what a mask is made from. A change shows by the
    object's identity, in a list, dictionary or set by its items', in a tensor by its version; ``batch_norm`` leaves no
    trace in the version of its statistics, so that of tensors with one dimension a change is always taken for granted,
    as it is of generators of random numbers. What an object of another kind holds is not known.

    It refers to the modules weakly, and to all that may refer to them, for autograd's graph holds it, and a module may
    hold that. ``generator`` copies generators of random numbers, which the arguments may hold as well.
    """

    def __init__(self, module: nn.Module, generator: Callable[[Any], Any] = generator_copy) -> None:
        places = [_Names(weakref.ref(m), buffers) for m in module.modules() for buffers in (True, False)]
        self._before = [(place, *_sorted(place, generator)) for place in places]
        self._changed: list[tuple[_Names, str, Any]] = []
        self._left: list[tuple[_Names, dict[str, Any], list[tuple[str, Any, int]]]] = []
        """What the first run left alone: values that nothing can change, and others with their versions."""

    def ran(self) -> None:
        """Forgets the copies of what the first run left alone."""
        for place, atoms, others in self._before:
            names, left = place.names(), []
            known = atoms.keys() | {name for name, *_ in others}
            added = [name for name in names if name not in known and not place.leaves_out(name)]
            self._changed += [(place, name, _ABSENT) for name in added]
            for name, value in _differing(atoms, names):
                self._changed.append((place, name, value))
                del atoms[name]
            for name, value, copy, version in others:
                if _differs(names.get(name, _ABSENT), value, copy, version):
                    self._changed.append((place, name, _LEFT if _has_graph(copy) else copy))
                elif not _has_graph(value):
                    left.append((name, _held(value), _version(value)))
            self._left.append((place, atoms, left))
        self._before.clear()

    @contextmanager
    def again(self, generator: Callable[[Any], Any] = generator_copy) -> Iterator[None]:
        """Runs the block with everything as before the first run; what it does to it is forgotten.

        Raises OffloadedModelError where the user has changed, since that run, what cannot be put back.
        """
        changed = [(place.names(), name, copy) for place, name, copy in [*self._changed, *self._changed_since()]]
        present = [(names, name, names.get(name, _ABSENT)) for names, name, _ in changed]
        for names, name, copy in changed:
            if copy is not _LEFT:
                _put(names, name, _copy(copy, generator))
        try:
            yield
        finally:
            for names, name, value in present:
                _put(names, name, value)

    def _changed_since(self) -> Iterator[tuple[_Names, str, Any]]:
        for place, atoms, left in self._left:
            names = place.names()
            yield from ((place, name, value) for name, value in _differing(atoms, names))
            for name, held, version in left:
                now = names.get(name, _ABSENT)
                if type(held) is _Kept:
                    if _differs(now, held.value, held.copy, version):
                        yield place, name, held.copy
                elif now is held:
                    if version != _version(now):
                        raise place.refusal(name, "written")
                elif type(held) is not _Reference:
                    yield place, name, held
                elif id(now) != held.number:
                    if (value := held.weak and held.weak()) is None:
                        raise place.refusal(name, "replaced")
                    yield place, name, value


@dataclass(frozen=True, eq=False)
class _Names:
    """Where a module keeps its buffers, or its plain attributes, by name."""

    module: weakref.ref[nn.Module]
    buffers: bool

    def names(self) -> dict[str, Any]:
        module = self.module()
        if module is None:  # it has been replaced since
            return {}
        return module._buffers if self.buffers else module.__dict__

    def leaves_out(self, name: str) -> bool:
        return not self.buffers and name in _OF_EVERY_MODULE

    def refusal(self, name: str, what: str) -> OffloadedModelError:
        module = self.module()
        return OffloadedModelError(
            "a layer runs again in the backward pass, and must find what it found in the forward pass (the "
            f"{'buffer' if self.buffers else 'attribute'} {name} of a {type(module).__name__} has been {what} in "
            "between); change it after backward(), or use offload(..., activations='keep')"
        )


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {
    *("forward", "_apply", "_replicate_for_data_parallel", "compile")
}
_ABSENT = object()
_LEFT = object()
"""Stands for a value with a graph: to hold it would keep the graph of every step before."""


def _copy(value: Any, generator: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if type(value) in (list, dict, set):
        return value.copy()
    return generator(value) if is_generator(value) else value


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _differs(now: Any, value: Any, copy: Any, version: int) -> bool:
    if now is not value:
        return True
    if isinstance(now, Tensor):
        return not now.requires_grad and (now.ndim == 1 or _version(now) != version)
    if type(now) in (list, set, dict):
        items = [[*one.items()] if isinstance(one, dict) else [(item, item) for item in one] for one in (now, copy)]
        return len(items[0]) != len(items[1]) or any(
            k is not key or v is not item for (k, v), (key, item) in zip(*items, strict=True)
        )
    return is_generator(now)  # whether it has drawn takes longer to see than to put it back


class _Reference(NamedTuple):
    """What may refer to a module: held by its identity, and weakly where that is possible."""

    number: int
    weak: weakref.ref[Any] | None


_ATOMIC = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def _sorted(place: _Names, generator: Callable[[Any], Any]) -> tuple[dict[str, Any], list[tuple[str, Any, Any, int]]]:
    """Returns what is at a place: values that nothing can change, and others with their copies and versions."""
    atoms: dict[str, Any] = {}
    others = []
    for name, value in place.names().items():
        if place.leaves_out(name):
            continue
        if type(value) in _ATOMIC:
            atoms[name] = value
        else:
            others.append((name, value, _copy(value, generator), _version(value)))
    return atoms, others


def _differing(atoms: dict[str, Any], names: dict[str, Any]) -> list[tuple[str, Any]]:
    if atoms.items() <= names.items():
        return []
    return [(name, value) for name, value in atoms.items() if names.get(name, _ABSENT) is not value]


class _Kept(NamedTuple):
    """A list, dictionary or set that refers to no module, with its items as they were."""

    value: Any
    copy: Any


def _held(value: Any) -> Any:
    """Returns what can be kept beside a graph in the place of ``value``, and stands for it."""
    if isinstance(value, Tensor) or _refers_to_no_module(value):
        return _Kept(value, value.copy()) if type(value) in (list, dict, set) else value
    try:
        return _Reference(id(value), weakref.ref(value))
    except TypeError:
        return _Reference(id(value), None)


def _refers_to_no_module(value: Any, depth: int = 3) -> bool:
    if type(value) in _ATOMIC or isinstance(value, (type, Enum, BuiltinFunctionType)):
        return True
    if isinstance(value, FunctionType):
        return getattr(sys.modules.get(value.__module__), value.__name__, None) is value  # it is there for ever
    inner: tuple[Any, ...]
    if isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif type(value) in (list, tuple, set):
        inner = tuple(value)
    elif type(value) is dict:
        inner = tuple(value.values())
    else:
        return False
    return bool(depth) and len(inner) <= 8 and all(_refers_to_no_module(item, depth - 1) for item in inner)


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(_has_graph(item) for item in value.values())
    return isinstance(value, (list, tuple, set)) and any(_has_graph(item) for item in value)


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
