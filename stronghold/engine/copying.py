"""Copies of arguments: their containers and plain objects anew, and the tensors in them shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from random import Random, SystemRandom
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

ATOMS = (
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
ATOMS += (BuiltinFunctionType, torch.dtype, torch.device, torch.Size)  # type: ignore[assignment]


@dataclass(frozen=True)
class Place:
    """Stands for the tensor of this number in an argument list."""

    number: int


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a generator of random numbers of its own: PyTorch's, Python's or numpy's.

    SystemRandom has no state of its own, and draws again what no copy would.
    """
    if isinstance(value, SystemRandom):
        return False
    return isinstance(value, (torch.Generator, Random)) or type(value).__module__.startswith("numpy.random")


def generator_copy(value: Any) -> Any:
    """Returns a generator that draws what ``value`` would draw next. PyTorch's own, which checkpoints restore, stay."""
    if not isinstance(value, torch.Generator):
        return deepcopy(value)
    of_devices = getattr(getattr(torch, value.device.type, None), "default_generators", ())
    return value if any(value is own for own in (torch.default_generator, *of_devices)) else value.clone_state()


Memo = dict[int, tuple[Any, Any]]
"""What can be written into, by its id: the original, and its copy."""


class GeneratorCopies:
    """Copies each generator of random numbers once: one that is at two places is one there again."""

    def __init__(self) -> None:
        self._copies: Memo = {}

    def __call__(self, value: Any) -> Any:
        """Returns the copy of ``value``, which draws what it would have drawn next when it was first asked for."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, generator_copy(value)
        return self._copies[id(value)][1]


def structural_copy(
    value: Any,
    tensor: Callable[[Any], Any] = lambda t: t,
    memo: Memo | None = None,
    generator: Callable[[Any], Any] = lambda g: g,
) -> Any:
    """Copies the containers and plain objects in ``value`` and shares the tensors (or maps them by ``tensor``).

    So it does with generators of random numbers, and ``generator``. A key-value cache that a layer fills is such an
    object: the second run must find it as the first one did, or it would attend to its own keys. Objects that cannot be
    copied this way are shared. The copies go into ``memo``.
    """
    if isinstance(value, (Tensor, Place)):
        return tensor(value)
    if isinstance(value, ATOMS):
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][1]
    if is_generator(value):
        drawing = generator(value)
        memo[id(value)] = value, drawing
        return drawing
    again = partial(structural_copy, tensor=tensor, memo=memo, generator=generator)
    if isinstance(value, tuple):
        items = [again(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        copied = value.__class__.__new__(value.__class__)
        memo[id(value)] = value, copied
        copied.extend(again(item) for item in value)
        return copied
    if isinstance(value, deque):
        queue = copy(value)
        memo[id(value)] = value, queue
        for place, item in enumerate(value):
            queue[place] = again(item)
        return queue
    if isinstance(value, dict):
        found = _copied(value)
        memo[id(value)] = value, found
        for key, item in value.items():
            found[key] = again(item)
        return found
    if isinstance(value, set):
        memo[id(value)] = value, value.copy()
        return memo[id(value)][1]
    named = attributes_of(value)
    if type(value).__module__ == "builtins" or named is None:
        return value
    try:
        made = value.__class__.__new__(value.__class__)
    except TypeError:
        return value
    memo[id(value)] = value, made
    for name, item in named.items():
        object.__setattr__(made, name, again(item))
    return made


def _copied(value: dict) -> dict:
    """Returns a shallow copy of its own class."""
    try:
        return copy(value)
    except KeyError:  # Python 3.10 asks for ``__getstate__`` where ``__getattr__ = dict.__getitem__``
        found = value.__class__.__new__(value.__class__)
        vars(found).update(vars(value))
        dict.update(found, value)
        return found


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes that an object has itself, in slots too; None where it can have none."""
    slots = _slots_of(type(value))  # type: ignore[arg-type]
    found = {name: getattr(value, name) for name in slots or () if hasattr(value, name)}
    if not hasattr(value, "__dict__"):
        return None if slots is None else found
    return {**found, **vars(value)} if found else vars(value)


@lru_cache(maxsize=256)
def _slots_of(kind: type) -> list[str] | None:
    slots: list[str] = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        slots += [_mangled(name, base) for name in ([own] if isinstance(own, str) else own)]
    return [name for name in slots if name not in ("__dict__", "__weakref__")] if slots else None


def _mangled(name: str, kind: type) -> str:
    """Returns the name under which Python keeps an attribute of the class that declares it: ``_Kind__private``."""
    owner = kind.__name__.lstrip("_")
    return f"_{owner}{name}" if owner and name.startswith("__") and not name.endswith("__") else name
