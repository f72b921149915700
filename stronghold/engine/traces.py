"""What shows that a hook has changed something: the objects that are there, their tensors' versions, random states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.copying import ATOMS, attributes_of, is_generator
from stronghold.engine.process_generators import process_marks

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""By what ``nn.Module`` itself keeps its own."""


class Attributes:
    """The attributes and buffers of modules, but for those by which ``nn.Module`` itself keeps its own.

    Every call of a hook asks for them, with hundreds of modules in a layer: their names are listed once, and again
    where a place no longer has as many as then, or misses one.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [names for module in modules for names in (vars(module), module._buffers)]
        self._list()

    def values(self) -> list[Any]:
        """Returns the list of their names, which is the same object as long as these are, and what they are now."""
        if [*map(len, self._places)] == self._lengths:
            with suppress(KeyError):
                return [self._names, *map(getitem, self._homes, self._names)]
        self._list()
        return [self._names, *map(getitem, self._homes, self._names)]

    def _list(self) -> None:
        self._lengths = [*map(len, self._places)]
        found = [(place, name) for place in self._places for name in place if name not in OF_EVERY_MODULE]
        self._homes, self._names = [place for place, _ in found], [name for _, name in found]


class Trace:
    """What a hook finds: its arguments, the modules of its layer, and the state that random numbers come from.

    Of the arguments that is all that a layer's second run gets anew, however deep; of the modules, ``attributes``; of
    the hook's own module also what ``nn.Module`` keeps, the items of flat containers, and the values of buffers on the
    host, which ``.data`` changes without a trace. To compare values on a device would be to wait for it.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], attributes: Attributes) -> None:
        self._objects: list[Any] = [*attributes.values(), *vars(module).values(), *module._buffers.values()]
        """Held, so that no other object has the place of one that was there."""
        self._versions: list[Any] = [version_of(value) for value in _tensors(self._objects)]
        self._walk(arguments, set())
        for value in vars(module).values():
            if type(value) in (list, set):
                self._objects += value
            elif type(value) is dict:
                self._objects += (*value, *value.values())
            elif is_generator(value):
                self._versions.append(object())  # whether it has drawn does not show
        tensors = _tensors([*module._buffers.values(), *vars(module).values()])
        silent = [tensor for tensor in tensors if tensor.device.type == "cpu" and changes_unseen(tensor)]
        self._values = [tensor.clone() for tensor in silent] + _random_states()
        self._versions.append(process_marks())

    def differs(self, other: Trace) -> bool:
        """Returns whether anything has changed between the two."""
        return (
            len(self._objects) != len(other._objects)
            or not all(map(is_, self._objects, other._objects))
            or self._versions != other._versions
            or len(self._values) != len(other._values)
            or not all(map(torch.equal, self._values, other._values))
        )

    def _walk(self, value: Any, seen: set[int]) -> None:
        self._objects.append(value)
        if isinstance(value, Tensor):
            self._versions.append(version_of(value))
        if isinstance(value, ATOMS) or id(value) in seen:
            return
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = (*value, *value.values())
        elif isinstance(value, (list, tuple, deque, set)):
            inner = value
        elif is_generator(value):
            self._versions.append(object())
        elif type(value).__module__ != "builtins":
            inner = (attributes_of(value) or {}).values()
        for item in inner:
            self._walk(item, seen)


def _tensors(values: list[Any]) -> list[Tensor]:
    """Returns those that are tensors: what most are not, a type tells of all its values at once."""
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, Tensor)}
    return [value for value in values if type(value) in kinds] if kinds else []


def version_of(tensor: Tensor) -> int:
    """Returns what autograd counts up where the tensor is written in place."""
    return 0 if tensor.is_inference() else tensor._version


def changes_unseen(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` are often written by ways that no version counts: batch_norm, ``.data``, kernels."""
    return not tensor.requires_grad and (tensor.ndim == 1 or tensor.is_floating_point())


def _random_states() -> list[Tensor]:
    accelerator = torch.accelerator.current_accelerator()
    kind = None if accelerator is None else getattr(torch, accelerator.type, None)
    return [g.get_state() for g in (torch.default_generator, *getattr(kind, "default_generators", ()))]
