"""What a layer's second run is to find of the first one's attributes, held without the modules or a graph."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ATOMIC = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OF_PAIRS = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = (list, set, deque, *_OF_PAIRS)


def items_of(value: Any) -> Collection[Any]:
    """Returns what a list, queue, dictionary or set consists of, and nothing for all else."""
    if type(value) in _OF_PAIRS:
        return (*value, *value.values())
    return value if type(value) in CONTAINERS else ()


class GraphValue:
    """A tensor with a graph that the first run found: the second finds its values, for gradients go to the first's.

    Of a view they are copied: the user may go on to fill the rest of what it is a view of, which has one version.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.whose, self.is_copy = weakref.ref(tensor), tensor._is_view()
        values = tensor.detach()  # nothing of the graph, which may be that of every step before
        self.values = values.clone() if self.is_copy else values

    def again(self) -> Tensor:
        return self.values.detach().requires_grad_()


class GraphItems:
    """A list, tuple, queue or dictionary of tensors with graphs, and of what is plain: the second run finds values.

    They are copied where they are views ``over_weights``, whose memory has other weights by then.
    """

    def __init__(self, value: Any, over_weights: Callable[[Tensor], bool]) -> None:
        pairs = value.items() if type(value) in _OF_PAIRS else enumerate(value)
        tensors = {key: item for key, item in pairs if isinstance(item, Tensor) and item.requires_grad}
        self._values = {
            key: item.detach().clone() if over_weights(item) else item.detach() for key, item in tensors.items()
        }
        self._is_tuple = type(value) is tuple
        self._rest = list(value) if self._is_tuple else value.copy()
        for key in self._values:
            self._rest[key] = None

    def again(self) -> Any:
        found = self._rest.copy()
        for key, values in self._values.items():
            found[key] = values.detach().requires_grad_()
        return tuple(found) if self._is_tuple else found


def without_graph(value: Any, over_weights: Callable[[Tensor], bool]) -> GraphValue | GraphItems | None:
    """Returns what stands in the second run for a value with a graph; None for what cannot be held without it.

    Nor are leaves held, such as the weights in a recurrent layer's list of them: they are their own values.
    """
    if isinstance(value, Tensor):
        return None if value.is_leaf else GraphValue(value)
    if type(value) not in (tuple, list, deque, *_OF_PAIRS):
        return None
    if isinstance(value, defaultdict) and not _refers_to_no_module(value.default_factory):
        return None
    items = items_of(value) or value
    if not all(map(_is_plain, set(map(type, items)))):
        return None
    if any(isinstance(item, Tensor) and item.requires_grad and item.is_leaf for item in items):
        return None
    return GraphItems(value, over_weights)


class Reference:
    """What may refer to a module: held by identity, weakly where that is possible, and the items of a container too."""

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        self.weak: weakref.ref[Any] | None = None
        with suppress(TypeError):
            self.weak = weakref.ref(value)
        self._items = [item if _is_plain(type(item)) else Reference(item) for item in items_of(value)]

    def is_of(self, value: Any) -> bool:
        return self.weak() is value if self.weak else id(value) == self._number

    def has_items(self, value: Any) -> bool:
        items = items_of(value)
        return len(items) == len(self._items) and all(
            held.is_of(item) if type(held) is Reference else held is item
            for held, item in zip(self._items, items, strict=True)
        )


class KeptItems(NamedTuple):
    """A list, queue, dictionary or set that refers to no module, with its items as they were."""

    value: Any
    copy: Any


def held_value(value: Any) -> Any:
    """Returns what can be kept beside a graph in the place of ``value``, and stands for it."""
    if isinstance(value, Tensor) or _refers_to_no_module(value):
        return KeptItems(value, value.copy()) if type(value) in CONTAINERS else value
    return Reference(value)


def _is_plain(kind: type) -> bool:
    """Whether values of this kind refer to no module; a tensor's graph is looked for elsewhere."""
    return kind in ATOMIC or issubclass(kind, Tensor)


def _refers_to_no_module(value: Any, depth: int = 3) -> bool:
    if _is_plain(type(value)) or isinstance(value, (type, Enum, BuiltinFunctionType)):
        return True
    if isinstance(value, FunctionType):
        return getattr(sys.modules.get(value.__module__), value.__name__, None) is value  # it is there for ever
    inner: Collection[Any]
    if isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif type(value) is tuple or type(value) in CONTAINERS:
        inner = items_of(value) or value
        if isinstance(value, defaultdict) and not _refers_to_no_module(value.default_factory):
            return False
    else:
        return False
    if all(map(_is_plain, set(map(type, inner)))):  # however many
        return True
    return bool(depth) and len(inner) <= 16 and all(_refers_to_no_module(item, depth - 1) for item in inner)
