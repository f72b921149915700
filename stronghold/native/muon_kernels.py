"""Typed wrappers of the host's kernels for Muon, with checks of each tensor's dtype, place, contiguity and length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stronghold.native.extension import _C
from stronghold.native.kernels import FLOAT32, LACKS_REMAINDER, address, check_threads, halves, resolve

_BF16 = (torch.bfloat16,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """Elements whose gradient goes into their momentum, and that into their direction.

    ``direction`` is bfloat16 and written; ``grad`` is float32 or bfloat16, or with ``grad_remainder``, int16, the high
    half of a split float; ``momentum_buffer`` is float32 and changed in place.
    """

    direction: Tensor
    grad: Tensor
    grad_remainder: Tensor | None
    momentum_buffer: Tensor
    momentum: float
    nesterov: bool
    grad_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Elements that move by ``lr`` in their ``direction``, bfloat16, after they decayed by ``decay``.

    ``weight`` is float32, or bfloat16 with its ``remainder``, int16; both are changed in place.
    """

    direction: Tensor
    weight: Tensor
    remainder: Tensor | None
    lr: float
    decay: float


def muon_momentum(piece: Momentum, *, threads: int, isa: str = "auto") -> None:
    """Brings momentum and direction up to date, the bits that PyTorch's ``lerp`` and rounding give.

    ``csrc/muon.h`` has the arithmetic, in float32.
    """
    check_threads(threads)
    count = piece.momentum_buffer.numel()
    call = (
        address("direction", piece.direction, _BF16, count),
        *halves("", "grad", piece.grad, "grad_remainder", piece.grad_remainder, count),
        piece.grad.dtype is torch.bfloat16,
        address("momentum_buffer", piece.momentum_buffer, FLOAT32, count),
        count,
        piece.momentum,
        piece.nesterov,
        piece.grad_scale,
    )
    _C.muon_momentum([call], threads, resolve(isa))


def muon_move(piece: Moved, *, threads: int, isa: str = "auto") -> None:
    """Moves the weights, to the bits of PyTorch's ``weight.mul_(1 - decay).add_(direction, alpha=-lr)``."""
    check_threads(threads)
    count = piece.weight.numel()
    if piece.weight.dtype is torch.bfloat16 and piece.remainder is None:
        raise ValueError(LACKS_REMAINDER.format("weight"))
    call = (
        address("direction", piece.direction, _BF16, count),
        *halves("", "weight", piece.weight, "remainder", piece.remainder, count),
        count,
        piece.lr,
        piece.decay,
    )
    _C.muon_move([call], threads, resolve(isa))
