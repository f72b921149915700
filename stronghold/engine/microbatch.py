"""Layer-major micro-batches: one layer runs over the batch a few samples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stronghold.engine.copying import structural_copy


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the tensor whose first dimension is the batch: the first floating one of two dimensions or more."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None


def split(args: Sequence[Any], kwargs: dict[str, Any], size: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cuts the arguments of a layer into micro-batches of ``size`` samples; one piece where there is nothing to cut.

    Tensors whose first dimension is the batch are cut, in containers and caches too; all others (positions, masks
    that broadcast) go to every piece. All parts of a tensor are one function's for autograd, which puts their gradients
    together at once: cut one by one, each would be added to zeros as long as the batch. Autograd therefore refuses to
    write into one in place. Raises ValueError for a tensor whose first dimension could as well be another, because the
    batch is as long as the sequence.
    """
    leader = batch_of(args, kwargs)
    if leader is None or leader.shape[0] <= size:
        return [(tuple(args), kwargs)]
    batch, others = leader.shape[0], leader.shape[1:]

    def batched(tensor: Tensor) -> bool:
        if tensor.ndim == 0 or tensor.shape[0] != batch:
            return False
        if tensor.ndim > 2 or tensor.ndim == leader.ndim or batch not in others[: 3 - tensor.ndim]:
            return True
        if tensor.ndim == 1 and not tensor.is_floating_point():
            return False  # positions
        raise ValueError(
            f"micro_batch must know which arguments have the batch as first dimension (got one of shape "
            f"{tuple(tensor.shape)} beside an input of shape {tuple(leader.shape)}: it may as well be another); change "
            "the batch size or the length, or offload without micro_batch"
        )

    parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}

    def cut(tensor: Tensor, number: int) -> Tensor:
        if id(tensor) not in parts:
            parts[id(tensor)] = tensor, tensor.split(size) if batched(tensor) else ()
        _, found = parts[id(tensor)]
        return found[number] if found else tensor

    pieces = []
    for number in range(-(-batch // size)):
        piece = partial(cut, number=number)
        memo: dict = {}
        pieces.append(
            (
                tuple(structural_copy(value, piece, memo) for value in args),
                {name: structural_copy(value, piece, memo) for name, value in kwargs.items()},
            )
        )
    return pieces


def join(outputs: Sequence[Any], leaders: Sequence[Sequence[int]]) -> Any:
    """Puts the outputs of micro-batches together as one run's output; ``leaders`` are the shapes of their inputs.

    A tensor is put together whose first dimension is the micro-batch, or the micro-batch times the sequence; one whose
    first dimension is one is the same for every sample (a position bias). Raises ValueError for all others, such as an
    auxiliary loss that the layer has already averaged over its samples.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        lengths = [output.shape[0] if output.ndim else 0 for output in outputs]
        if lengths == [shape[0] for shape in leaders]:
            return torch.cat(list(outputs))
        if first.ndim > 1 and all(n == shape[0] * shape[1] for n, shape in zip(lengths, leaders, strict=True)):
            return torch.cat(list(outputs))
        if first.ndim > 1 and set(lengths) == {1}:
            return first
        raise ValueError(
            f"micro_batch must be able to put a layer's outputs together (got one of shape {tuple(first.shape)} for an "
            f"input of shape {tuple(leaders[0])}: its first dimension is not the batch); offload without micro_batch"
        )
    if isinstance(first, tuple):
        items = [join(parts, leaders) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, list):
        return [join(parts, leaders) for parts in zip(*outputs, strict=True)]
    if isinstance(first, dict):
        joined = copy(first)  # of its own class
        for key in first:
            joined[key] = join([output[key] for output in outputs], leaders)
        return joined
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: join([getattr(o, f.name) for o in outputs], leaders) for f in fields(first) if f.init}
        return replace(first, **parts)
    if isinstance(first, (bool, int, float)) and any(output != first for output in outputs):
        raise ValueError(
            f"micro_batch must be able to put a layer's outputs together (got the numbers {list(outputs)} for its "
            "micro-batches); offload without micro_batch"
        )
    return first
