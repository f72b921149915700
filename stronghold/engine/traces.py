"""What shows that a hook has changed something: the objects that are there, their tensors' versions, random states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.copying import ATOMS, attributes_of, is_generator


class Trace:
    """What a hook finds: its arguments, the modules of its layer, and the state that random numbers come from.

    Of the arguments that is all that a layer's second run gets anew, however deep; of the modules, the attributes and
    buffers; of the hook's own module also the items of flat containers, and the values of buffers, which ``.data``
    changes without a trace. ``entries`` are the dictionaries in which the layer's modules have theirs.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], entries: Iterable[dict[str, Any]]) -> None:
        self._objects: list[Any] = []
        """Held, so that no other object has the place of one that was there."""
        self._versions: list[Any] = []
        for names in entries:
            self._objects += names.values()
        self._versions += [version_of(value) for value in self._objects if isinstance(value, Tensor)]
        self._walk(arguments, set())
        for value in vars(module).values():
            if type(value) in (list, set):
                self._objects += value
            elif type(value) is dict:
                self._objects += (*value, *value.values())
            elif is_generator(value):
                self._versions.append(object())  # whether it has drawn does not show
        tensors = [*module._buffers.values(), *vars(module).values()]
        silent = [t for t in tensors if isinstance(t, Tensor) and changes_unseen(t)]
        self._values = [tensor.clone() for tensor in silent] + _random_states()

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
