"""The tensors in the arguments and outputs of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from stronghold.engine.replay import structural_copy


@dataclass(frozen=True)
class _Place:
    """Stands for the tensor of this number in an argument list."""

    number: int


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Replaces the tensors in the argument containers by places; copies everything else that a run may change.

    They are put into ``tensors``, in their order.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)(flatten(item, tensors) for item in value)
    if type(value) is dict:
        return {key: flatten(item, tensors) for key, item in value.items()}
    return structural_copy(value)


def fill(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Puts ``tensors`` in their places; again nothing is shared that a run may change."""
    if type(value) is _Place:
        return tensors[value.number]
    if type(value) in (list, tuple):
        return type(value)(fill(item, tensors) for item in value)
    if type(value) is dict:
        return {key: fill(item, tensors) for key, item in value.items()}
    return structural_copy(value)


def nodes_of(output: Any) -> set[Node]:
    """Returns where the backward pass enters the layer, as far as its output shows."""
    if isinstance(output, Tensor):
        return set() if output.grad_fn is None else {output.grad_fn}
    if isinstance(output, (list, tuple)):
        return {node for item in output for node in nodes_of(item)}
    if isinstance(output, dict):
        return {node for item in output.values() for node in nodes_of(item)}
    return set()
