"""The tensors in the arguments and outputs of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from stronghold.engine.copying import Place, generator_copy, structural_copy


def flatten(value: Any, tensors: list[Tensor], generator: Callable[[Any], Any] = generator_copy) -> Any:
    """Replaces the tensors in argument containers and dataclasses by places; copies all else that a run may change.

    They are put into ``tensors``, in their order. Those in other objects, such as a cache of all layers, stay there.
    ``generator`` copies generators of random numbers.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Place(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)(flatten(item, tensors, generator) for item in value)
    if type(value) is dict:
        return {key: flatten(item, tensors, generator) for key, item in value.items()}
    if is_dataclass(value):
        return structural_copy(value, lambda tensor: flatten(tensor, tensors), generator=generator)
    return structural_copy(value, generator=generator)


def fill(value: Any, tensors: tuple[Tensor, ...], generator: Callable[[Any], Any] = generator_copy) -> Any:
    """Puts ``tensors`` in their places; again nothing is shared that a run may change, copied as ``flatten`` does."""
    if type(value) is Place:
        return tensors[value.number]
    if type(value) in (list, tuple):
        return type(value)(fill(item, tensors, generator) for item in value)
    if type(value) is dict:
        return {key: fill(item, tensors, generator) for key, item in value.items()}
    return structural_copy(value, lambda one: tensors[one.number] if type(one) is Place else one, generator=generator)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in an output, and in the lists, tuples, dictionaries and dataclasses that it is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])


def nodes_of(output: Any) -> set[Node]:
    """Returns where the backward pass enters the layer, as far as its output shows."""
    if isinstance(output, Tensor):  # most often, and at every layer
        return set() if output.grad_fn is None else {output.grad_fn}
    return {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
