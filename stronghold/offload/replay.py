"""What a layer's second run needs to be its first run again: arguments, buffers and hooks as they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    if isinstance(value, (list, tuple)):
        items = [structural_copy(item, tensor, memo) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        copied = memo[id(value)] = value.__class__.__new__(value.__class__)
        copied.extend(items)
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


class Buffers:
    """The buffers of a layer as they were before its first run, kept where that run changed them."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(m, name) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        self._before = [(m._buffers[name], m._buffers[name].clone()) for m, name in self._places]  # type: ignore[union-attr]
        self._versions = [buffer._version for buffer, _ in self._before]  # type: ignore[union-attr]
        self._changed: list[tuple[nn.Module, str, Tensor]] = []

    def ran(self) -> None:
        """Forgets the copies of buffers that the first run left alone."""
        for (module, name), (buffer, copy), version in zip(self._places, self._before, self._versions, strict=True):
            now = module._buffers[name]
            if now is not buffer or now._version != version:  # type: ignore[union-attr]
                self._changed.append((module, name, copy))
        self._before.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block with the buffers as before the first run; what it does to them is forgotten."""
        present = [(module, name, module._buffers[name]) for module, name, _ in self._changed]
        for module, name, copy in self._changed:
            module._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for module, name, buffer in present:
                module._buffers[name] = buffer


class Hooks:
    """Keeps forward hooks that only look from looking twice.

    A hook that returned None in the first run and left the output as it was records something; a second call would
    record it twice. One that changed the output belongs to the computation and runs again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [m for m in module.modules() if m is not module and m._forward_hooks]
        self._lookers: set[tuple[int, int]] = set()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Runs the block and notes which hooks only look."""
        if not self._modules:
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
        originals = [(m, m._forward_hooks) for m in self._modules]
        for number, (module, hooks) in enumerate(originals):
            new = ((handle, replace((number, handle), hook)) for handle, hook in hooks.items())
            module._forward_hooks = OrderedDict((handle, hook) for handle, hook in new if hook is not None)
        try:
            yield
        finally:
            for module, hooks in originals:
                module._forward_hooks = hooks

    def _observed(self, key: tuple[int, int], hook: Callable) -> Callable:
        def observe(module: nn.Module, *rest: Any) -> Any:
            before = _versions(rest[-1])
            result = hook(module, *rest)
            if result is None and _versions(rest[-1]) == before:
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
