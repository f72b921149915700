"""What an update may refuse, asked before any unit's update writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.layout import BLOCK
from stronghold.native import Blocks
from stronghold.unit import Unit

if TYPE_CHECKING:
    from stronghold.optim.change import Change

_FLOATS = (torch.float32, torch.bfloat16)
_MOMENTS = (torch.float32,)
_CODES = (torch.uint8,)
_LOW = (torch.int16,)


def check_changes(unit: Unit, changes: Sequence[Change]) -> None:
    """Raises OffloadedModelError for gradients and states of ``unit`` that the update of its weights does not take.

    Both are tensors that the user may have replaced, or made over the memory of others.
    """
    spans: list[tuple[int, int, str]] = []
    for change in changes:
        elements, device = unit.counts[change.index], unit.weight[change.index].device
        _check_step(unit, change)
        for name, tensor, dtypes, count in _operands(unit, change):
            if (
                tensor.dtype not in dtypes
                or tensor.numel() != count
                or not tensor.is_contiguous()
                or tensor.device != device
            ):
                raise OffloadedModelError(
                    f"{name} of a parameter of {unit.name} must be {' or '.join(map(str, dtypes))} with {count} "
                    f"elements beside another, where the weight is (got {tensor.dtype} of shape {tuple(tensor.shape)} "
                    f"with strides {tensor.stride()} on {tensor.device}); nothing was updated. Write into the tensor "
                    "that is there rather than replace it"
                )
            if elements:
                begin = tensor.data_ptr()
                spans.append((begin, begin + tensor.nbytes, name))
    spans.sort()
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise OffloadedModelError(
                f"what an update reads and writes must have memory of its own (got {one} and {other} of {unit.name} in "
                "the same); nothing was updated. Set the one to a clone()"
            )


def _check_step(unit: Unit, change: Change) -> None:
    step = change.state["step"]
    number = float(step) if isinstance(step, Tensor) and step.numel() == 1 else math.nan
    if not (number >= 0 and number.is_integer()):
        raise OffloadedModelError(
            f"the step of a parameter's state must be a tensor of one whole number (got {step!r} in {unit.name}); "
            "nothing was updated. Set it through load_state_dict()"
        )


def _operands(unit: Unit, change: Change) -> Iterator[tuple[str, Tensor, tuple[torch.dtype, ...], int]]:
    """Yields what an update of one parameter reads and writes: (name, tensor, its possible dtypes, its elements)."""
    count = unit.counts[change.index]
    yield "weight", unit.weight[change.index], _FLOATS, count
    if (remainder := unit.remainder(change.index)) is not None:
        yield "remainder", remainder, _LOW, count
    yield "gradient", change.gradient.values, _FLOATS, count
    if (low := change.gradient.remainder) is not None:
        yield "gradient's remainder", low, _LOW, count
    for name in change.moments:
        moment = change.state[name]
        if isinstance(moment, Blocks):
            yield f"{name}'s codes", moment.codes, _CODES, count
            yield f"{name}'s exponents", moment.exponents, _CODES, -(-count // BLOCK)
        else:
            yield name, moment, _MOMENTS, count
