"""What a layer's second run needs to be its first run again: arguments, buffers and hooks as they were."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (
    Tensor,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    Enum,
    FunctionType,
    MethodType,
)
_ATOMS += (BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.Generator)  # type: ignore[assignment]


def structural_copy(value: Any, tensor: Callable[[Tensor], Tensor] = lambda t: t, memo: dict | None = None) -> Any:
    """Copies the containers and plain objects in ``value`` and shares the tensors (or maps them by ``tensor``).

    A key-value cache that a layer fills is such an object: the second run must find it as the first one did, or it
    would attend to its own keys. Objects that cannot be copied this way are shared.
    """
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, _ATOMS):
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [structural_copy(item, tensor, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        copied = memo[id(value)] = value.__class__.__new__(value.__class__)
        copied.extend(structural_copy(item, tensor, memo) for item in value)
        return copied
    if isinstance(value, dict):
        copy = memo[id(value)] = value.copy()
        for key, item in value.items():
            copy[key] = structural_copy(item, tensor, memo)
        return copy
    if isinstance(value, set):
        return value.copy()
    if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        return value
    try:
        copy = value.__class__.__new__(value.__class__)
    except TypeError:
        return value
    memo[id(value)] = copy
    for name, item in vars(value).items():
        copy.__dict__[name] = structural_copy(item, tensor, memo)
    return copy


class State:
    """What a layer's modules keep between runs, as it was before the first run; held where that run changed it.

    That is buffers and plain attributes. A change shows by the object's identity, in a list, dictionary or set by its
    items', in a tensor by its version; ``batch_norm`` leaves no trace in the version of its statistics, so that of
    tensors with one dimension a change is always taken for granted. What an object of another kind holds is not known.

    It refers to the modules weakly, for autograd's graph holds it, and a module may hold that.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [_Names(weakref.ref(m), buffers) for m in module.modules() for buffers in (True, False)]
        self._before = [(place, name, value, _copy(value), _version(value)) for place, name, value in self._all()]
        self._changed: list[tuple[_Names, str, Any]] = []

    def ran(self) -> None:
        """Forgets what the first run left alone."""
        known = set()
        for place, name, value, copy, version in self._before:
            known.add((id(place), name))
            if _differs(place.names().get(name, _ABSENT), value, copy, version):
                self._changed.append((place, name, _LEFT if _has_graph(copy) else copy))
        self._changed += [(place, name, _ABSENT) for place, name, _ in self._all() if (id(place), name) not in known]
        self._before.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block with everything as before the first run; what it does to it is forgotten."""
        changed = [(place.names(), name, copy) for place, name, copy in self._changed]
        present = [(names, name, names.get(name, _ABSENT)) for names, name, _ in changed]
        for names, name, copy in changed:
            if copy is not _LEFT:
                _put(names, name, _copy(copy))
        try:
            yield
        finally:
            for names, name, value in present:
                _put(names, name, value)

    def _all(self) -> Iterator[tuple[_Names, str, Any]]:
        for place in self._places:
            left_out = () if place.buffers else _OF_EVERY_MODULE
            yield from ((place, name, value) for name, value in place.names().items() if name not in left_out)


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


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_apply"}
_ABSENT = object()
_LEFT = object()
"""Stands for a value with a graph: to hold it would keep the graph of every step before."""


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    return value.copy() if type(value) in (list, dict, set) else value


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
    return False


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


class Hooks:
    """Keeps forward hooks that only look from looking twice.

    A hook that returned None in the first run and left its arguments and its module as they were records something; a
    second call would record it twice. One that changed them belongs to the computation and runs again.
    """

    _KINDS = ("_forward_pre_hooks", "_forward_hooks")

    def __init__(self, module: nn.Module) -> None:
        inner = (m for m in module.modules() if m is not module)
        self._places = [(weakref.ref(m), kind) for m in inner for kind in self._KINDS if getattr(m, kind)]
        self._lookers: set[tuple[int, int]] = set()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Runs the block and notes which hooks only look."""
        if not self._places:
            yield
            return
        with self._replaced(self._observed):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block without the hooks that only look."""
        if not self._lookers:
            yield
            return
        with self._replaced(lambda key, hook: None if key in self._lookers else hook):
            yield

    @contextmanager
    def _replaced(self, replace: Callable[[tuple[int, int], Callable], Callable | None]) -> Iterator[None]:
        places = ((number, module(), kind) for number, (module, kind) in enumerate(self._places))
        originals = [(number, m, kind, getattr(m, kind)) for number, m, kind in places if m is not None]
        for number, module, kind, hooks in originals:
            new = ((handle, replace((number, handle), hook)) for handle, hook in hooks.items())
            setattr(module, kind, OrderedDict((handle, hook) for handle, hook in new if hook is not None))
        try:
            yield
        finally:
            for _, module, kind, hooks in originals:
                setattr(module, kind, hooks)

    def _observed(self, key: tuple[int, int], hook: Callable) -> Callable:
        def observe(module: nn.Module, *rest: Any) -> Any:
            before = _versions(rest), dict(vars(module))
            result = hook(module, *rest)
            values = [before[1].get(name, _ABSENT) is value for name, value in vars(module).items()]
            if result is None and _versions(rest) == before[0] and all(values) and len(values) == len(before[1]):
                self._lookers.add(key)
            return result

        return observe


def _versions(output: Any) -> list[int]:
    if isinstance(output, Tensor):
        return [output._version]
    if isinstance(output, (list, tuple)):
        return [version for item in output for version in _versions(item)]
    if isinstance(output, dict):
        return [version for item in output.values() for version in _versions(item)]
    return []
