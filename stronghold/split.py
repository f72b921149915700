"""An fp32 number as a bf16 number and a 16-bit remainder: lossless, and no larger than the fp32 number alone.

With B the 32 bits of the number, the bf16 part is ``(B + 0x8000) >> 16``, the nearest bf16 number, and the remainder
the low 16 bits of B, read as a signed integer: ``B = (bf16 << 16) + remainder``. A number half way between two bf16
numbers goes to the one that is larger in magnitude. That is what makes the remainder fit: so every bf16 number is the
nearest of 65,536 fp32 numbers, as many as 16 bits tell apart. With ties to even, an even one would be the nearest of
65,537 and an odd one of 65,535.

Every number and both infinities come back bit for bit. A NaN stays a NaN in the bf16 part and in the whole, for which
it gives up the low bits of its payload: among the NaNs there is no room for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SPLIT = 1 << 18
"""Elements that are split or joined at a time, which bounds the temporary memory."""
_SIGN, _INFINITY, _QUIET = -(2**31), 0x7F800000, 0x40


def split(values: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Writes fp32 ``values`` as ``weight`` (bf16) and ``remainder`` (int16), all of one shape and device."""
    for part, high, low in _parts(values.detach(), weight, remainder):
        bits = part.view(torch.int32)
        nan = (bits & ~_SIGN) > _INFINITY
        # int32 wraps around as the bits should; the shift carries the sign, which narrowing to int16 drops again.
        halves = torch.where(nan, (bits >> 16) | _QUIET, (bits + 0x8000) >> 16)
        high.copy_(halves.to(torch.int16).view(torch.bfloat16))
        low.copy_(torch.where(nan, 0, bits).to(torch.int16))


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 numbers that ``weight`` (bf16) and ``remainder`` (int16) hold."""
    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for part, high, low in _parts(values, weight.detach(), remainder):
        bits = high.view(torch.int16).to(torch.int32) << 16
        part.copy_((bits + low).view(torch.float32))
    return values


def rounded(values: Tensor) -> Tensor:
    """Returns the bf16 part of fp32 ``values`` alone."""
    weight = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    split(values, weight, torch.empty(values.shape, dtype=torch.int16, device=values.device))
    return weight


def _parts(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cuts tensors of one shape where that is a matter of views, so that the work on a part takes little memory."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(SPLIT) for tensor in tensors), strict=True)
