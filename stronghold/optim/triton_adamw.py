"""AdamW on the device that holds a layer, in one launch for its parameters.

Importing this file imports triton, so only :mod:`stronghold.optim.adamw_on_device` imports it, where a device can run
the kernel of :mod:`stronghold.optim.triton_adamw_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim.triton_adamw_kernel import adamw_of_segments, number_of
from stronghold.optim.triton_formats import FIRST_FACTOR, SECOND_FACTOR

ROWS = 16
"""The blocks of :data:`BLOCK` elements that one program, of four warps, updates."""

MOST = 16
"""The segments that one launch updates at most: their addresses are the kernel's arguments, which have 4 KB."""
_WIDE = 16
"""Addresses, in bytes, and numbers of elements that are multiples of this are read and written many at a time."""

_FIRST_STEP_FACTOR = 0x6A09E667
_SECOND_STEP_FACTOR = 0x9E3779B9


def launch(segment: Segment, *, squares: Tensor | None = None) -> None:
    """Launches one step of AdamW on the segment's device, in its current stream, and waits for nothing.

    Args:
        segment: contiguous tensors, all on one device.
        squares: a number on that device; where it is not finite, nothing changes.

    Raises:
        ValueError: a tensor has another dtype, device or number of elements, or is not contiguous.
    """
    _check(segment, squares)
    launch_all([segment], None if squares is None else [squares])


def launch_all(segments: Sequence[Segment], squares: Sequence[Tensor] | None = None) -> None:
    """Launches a step of AdamW for segments on one device, as :func:`launch` does for each; that they fit is not asked.

    One launch updates up to :data:`MOST` with settings, formats and a step in common. A copy of their addresses to the
    device would stand in line behind those of layers, so they are the kernel's arguments.
    """
    together: dict[tuple[_Settings, _Format], list[tuple[Sequence[int | None], int]]] = {}
    for number, segment in enumerate(segments):
        if elements := segment.weight.numel():
            its = None if squares is None else squares[number]
            addresses = _addresses(segment, its)
            key = (_Settings.of(segment), _Format.of(segment, elements, addresses, its))
            together.setdefault(key, []).append((addresses, _programs(elements)))
    with torch.accelerator.device_index(segments[0].weight.device.index):  # Triton launches on the current device
        for (settings, form), found in together.items():
            for begin in range(0, len(found), MOST):
                _launch(settings, form, found[begin : begin + MOST])


def _launch(settings: _Settings, form: _Format, found: Sequence[tuple[Sequence[int | None], int]]) -> None:
    """Launches the kernel for segments of which ``found`` has the addresses and the programs that update each."""
    count = 1 << (len(found) - 1).bit_length()  # few numbers of arguments, for each of which it is compiled
    # What is left over has no elements: it ends where the first one begins.
    begin, _, *others = found[0][0]
    empty = [[begin, begin, *others]] * (count - len(found))
    columns = zip(*(addresses for addresses, _ in found), *empty, strict=True)
    adamw_of_segments[(sum(programs for _, programs in found),)](
        *(None if column[0] is None else tuple(map(number_of, column)) for column in columns),
        **_coefficients(settings),
        **form.constants(),
        COUNT=count,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )


def _addresses(s: Segment, squares: Tensor | None) -> Sequence[int | None]:
    """Returns where the weights begin and end, and the others begin, as the kernel takes them; None for what is not."""
    first, second = _parts(s.exp_avg), _parts(s.exp_avg_sq)
    return (
        weight := s.weight.data_ptr(),
        weight + s.weight.nbytes,
        None if s.remainder is None else s.remainder.data_ptr(),
        s.grad.data_ptr(),
        None if s.grad_remainder is None else s.grad_remainder.data_ptr(),
        *first,
        *second,
        None if squares is None else squares.data_ptr(),
    )


def _parts(moment: Tensor | Blocks) -> tuple[int, int | None]:
    if isinstance(moment, Blocks):
        return moment.codes.data_ptr(), moment.exponents.data_ptr()
    return moment.data_ptr(), None


def _programs(elements: int) -> int:
    return -(-elements // (ROWS * BLOCK))


class _Format(NamedTuple):
    """What a kernel is compiled for, beside the number of its segments, and which of its arguments there are."""

    whole_weight: bool
    whole_grad: bool
    split_grad: bool
    squares: torch.dtype | None
    wide: bool

    @classmethod
    def of(cls, s: Segment, elements: int, addresses: Sequence[int | None], squares: Tensor | None) -> _Format:
        together = elements
        for address in addresses[:-1]:
            together |= address or 0
        return cls(
            s.remainder is None,
            s.grad.dtype is torch.float32,
            s.grad_remainder is not None,
            None if squares is None else squares.dtype,
            not together % _WIDE,
        )

    def constants(self) -> dict[str, Any]:
        """Returns them by the kernel's names."""
        halves, whole = tl.int16, tl.float32  # bf16 numbers as the integers of their bits
        return {
            "WEIGHT": whole if self.whole_weight else halves,
            "GRAD": whole if self.whole_grad else halves,
            "SQUARES": tl.float32 if self.squares is torch.float32 else tl.float64,
            "WIDE": _WIDE if self.wide else 1,
        }


class _Settings(NamedTuple):
    """What a launch has in common for all its segments."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float
    first: int
    in_blocks: bool

    @classmethod
    def of(cls, s: Segment) -> _Settings:
        blocks = isinstance(s.exp_avg, Blocks)
        return cls(s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.step, s.grad_scale, s.first, blocks)


@lru_cache
def _coefficients(s: _Settings) -> Mapping[str, float]:
    """Returns the kernel's numbers, computed in float64 as ``csrc/adamw.cpp`` does and rounded to fp32 last."""
    correction = math.sqrt(1 - s.beta2**s.step)
    unbiased = 1 - s.beta1**s.step
    decay = 1 - s.lr * s.weight_decay
    if s.in_blocks:
        given = {
            "beta1": s.beta1,
            "new1": 1 - s.beta1,
            "beta2": s.beta2,
            "new2": 1 - s.beta2,
            "decay": decay,
            "step_size": s.lr / unbiased,
        }
        pairs = {name: (float(np.float32(value)), 0.0) for name, value in given.items()}
        grad_scale, eps = s.grad_scale, s.eps
    else:
        _, exponent = math.frexp(s.grad_scale)
        grad_scale, scale = math.ldexp(1.0, exponent - 1), math.ldexp(s.grad_scale, 1 - exponent)
        given = {
            "beta1": s.beta1,
            "new1": (1 - s.beta1) * scale,
            "beta2": s.beta2,
            "new2": (1 - s.beta2) * scale * scale,
            "decay": decay,
            "step_size": -s.lr * correction / unbiased,
        }
        pairs = {name: _pair(value) for name, value in given.items()}
        eps = s.eps * correction
    return {
        **{name: high for name, (high, _) in pairs.items()},
        **{f"{name}_low": low for name, (_, low) in pairs.items()},
        "eps": float(np.float32(eps)),
        "grad_scale": float(np.float32(grad_scale)),
        "denom_scale": 1 / correction,
        "first_start": _int32(s.first * FIRST_FACTOR.value + s.step * _FIRST_STEP_FACTOR),
        "second_start": _int32(s.first * SECOND_FACTOR.value + s.step * _SECOND_STEP_FACTOR),
    }


def _pair(x: float) -> tuple[float, float]:
    """Returns ``x`` as ``csrc/adamw_task.h`` has a coefficient: rounded towards zero, and the rest, never zero."""
    high = np.float32(x)
    if abs(float(high)) > abs(x):
        high = np.nextafter(high, np.float32(0))
    rest = max(abs(x) - abs(float(high)), abs(x) * 2.0**-60)
    return float(high), float(np.float32(math.copysign(rest, x)))


def _int32(number: int) -> int:
    """Returns the signed number with the low 32 bits of ``number``: Triton would compile anew for an int64."""
    return (number + 2**31) % 2**32 - 2**31


def _check(segment: Segment, squares: Tensor | None) -> None:
    """Raises ValueError for what the kernel would read as something else."""
    weight, elements = segment.weight, segment.weight.numel()
    if isinstance(segment.exp_avg, Blocks) != isinstance(segment.exp_avg_sq, Blocks):
        raise ValueError("exp_avg and exp_avg_sq must be of one kind (got a tensor and Blocks); pass two of either")
    if isinstance(segment.exp_avg, Blocks) and segment.first % BLOCK:
        raise ValueError(f"first must be a multiple of {BLOCK} (got {segment.first}); cut between blocks")
    if segment.step < 1:
        raise ValueError(f"step counts from 1 (got {segment.step}); increase it before the update")
    halves = torch.float32 if segment.remainder is None else torch.bfloat16
    grads = (torch.float32, torch.bfloat16) if segment.grad_remainder is None else (torch.bfloat16,)
    rules: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], int]] = [
        ("weight", weight, (halves,), elements),
        ("remainder", segment.remainder, (torch.int16,), elements),
        ("grad", segment.grad, grads, elements),
        ("grad_remainder", segment.grad_remainder, (torch.int16,), elements),
        ("squares", squares, (torch.float32, torch.float64), 1),
    ]
    for name, moment in (("exp_avg", segment.exp_avg), ("exp_avg_sq", segment.exp_avg_sq)):
        if isinstance(moment, Blocks):
            rules.append((f"{name}.codes", moment.codes, (torch.uint8,), elements))
            rules.append((f"{name}.exponents", moment.exponents, (torch.uint8,), -(-elements // BLOCK)))
        else:
            rules.append((name, moment, (torch.float32,), elements))
    for name, tensor, dtypes, count in rules:
        if tensor is None:
            continue
        fits = tensor.dtype in dtypes and tensor.numel() == count and tensor.device == weight.device
        if not fits or not tensor.is_contiguous():
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"{name} must be {count} contiguous elements of {expected} on {weight.device} (got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, {tensor.device}); pass such a copy"
            )
