"""Layer-major micro-batches: one layer runs over the batch a few samples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stronghold.offload.replay import structural_copy


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the tensor whose first dimension is the batch: the first floating one of two dimensions or more."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None


def split(args: Sequence[Any], kwargs: dict[str, Any], size: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cuts the arguments of a layer into micro-batches of ``size`` samples; one piece where there is nothing to cut.

    Tensors whose first dimension is the batch are cut, in containers and caches too; all others (positions, masks
    that broadcast) go to every piece. Of a two-dimensional tensor whose first dimension could as well be the sequence,
    the second must agree with the layer's input too; one-dimensional ones are never cut.
    """
    leader = batch_of(args, kwargs)
    if leader is None or leader.shape[0] <= size:
        return [(tuple(args), kwargs)]
    batch = leader.shape[0]
    square = leader.ndim > 2 and leader.shape[1] == batch

    def batched(tensor: Tensor) -> bool:
        if tensor.ndim < 2 or tensor.shape[0] != batch:
            return False
        return not (square and tensor.ndim == 2) or tensor.shape[1] == leader.shape[1]

    pieces = []
    for begin in range(0, batch, size):

        def piece(tensor: Tensor, begin: int = begin) -> Tensor:
            return tensor[begin : begin + size] if batched(tensor) else tensor

        memo: dict = {}
        pieces.append(
            (
                tuple(structural_copy(value, piece, memo) for value in args),
                {name: structural_copy(value, piece, memo) for name, value in kwargs.items()},
            )
        )
    return pieces


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Puts the outputs of micro-batches of ``sizes`` samples together as one run's output.

    Raises ValueError for an output that cannot be put together: a tensor without dimensions, such as an auxiliary
    loss that the layer has already averaged over its samples.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim == 0:
            raise ValueError(
                "micro_batch needs layers whose outputs have the batch as first dimension (got a tensor without "
                "dimensions, already reduced over the samples); offload without micro_batch"
            )
        if any(
            o.shape[0] % n or o.shape[0] // n != first.shape[0] // sizes[0] for o, n in zip(outputs, sizes, strict=True)
        ):
            return first  # the same for every sample, such as a position bias
        return torch.cat(list(outputs))
    if isinstance(first, tuple):
        items = [join(parts, sizes) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, list):
        return [join(parts, sizes) for parts in zip(*outputs, strict=True)]
    if isinstance(first, dict):
        copy = first.copy()
        for key in first:
            copy[key] = join([output[key] for output in outputs], sizes)
        return copy
    return first
