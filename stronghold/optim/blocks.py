"""Moments in eight bits: small floating-point numbers, 64 to a shared exponent.

A block of 64 neighbours shares one exponent, a power of two, as in the Open Compute Project's Microscaling formats
(MX v1.0, 2023); that moments keep their worth when each block has a scale of its own is Dettmers, Lewis, Shleifer and
Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022). Below the block's exponent each number has its
own, and what is too small for it is a multiple of the smallest number, as with IEEE 754's subnormals:

- the first moment: a sign, three bits of exponent, four of mantissa. Its smallest number is about a thousandth of the
  block's largest, and what is smaller becomes zero or that, as often as gives its mean;
- the second: four bits of exponent, four of mantissa, a smallest number of about four millionths of the largest; and
  never zero unless it is zero, so that no update divides by a moment that was lost.

With the block's exponent ``E``, ``e`` bits of exponent and the least normal number ``B``, an fp32 number whose bits are
``base = (E - (2 ** e - 2)) << 23``, the code of a magnitude ``x`` is ``(bits(x + max(x, B)) + dither - base) >> 19``.
A moment changes by less in a step than its last bit (a second moment by a thousandth, with beta2 = 0.999), and
rounding to nearest would lose every such change. So the rounding is dithered, by a Weyl sequence over elements and
steps (H. Weyl, 1916): without bias, evenly spread over the steps, and the same on every machine.

This is the same arithmetic as in csrc/formats.h, in torch, for state dictionaries and for other devices than the CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stronghold.native import BLOCK, Blocks

LARGEST = 1.9375 * 2.0**119
"""The largest number that has a code, of either moment."""
_LARGEST_BITS = 0x7B780000
_SHIFT = 19
_LEAST_EXPONENT = 20
# By whether the moment is signed:
_BINADES = {True: 6, False: 14}
_WEYL = {True: (0x85EBCA6B, 0x6A09E667), False: (0xC2B2AE35, 0x9E3779B9)}
_ABS = 0x7FFFFFFF


def exponents_of(elements: int) -> int:
    """Returns how many shared exponents, of a byte each, ``elements`` numbers have."""
    return math.ceil(elements / BLOCK)


def decode(blocks: Blocks, *, signed: bool) -> Tensor:
    """Returns the fp32 numbers, flat, that the first moment's (``signed``) or the second's codes stand for."""
    codes = blocks.codes.to(torch.int32)
    base = _bases(blocks.exponents, signed=signed).repeat_interleave(BLOCK)[: codes.numel()]
    y = (base + ((codes & 127 if signed else codes) << _SHIFT)).view(torch.float32)
    values = torch.minimum(y - base.view(torch.float32), y / 2)
    return torch.where(codes >= 128, -values, values) if signed else values


def encode(values: Tensor, blocks: Blocks, *, signed: bool, step: int | None, first: int = 0) -> None:
    """Writes fp32 ``values``, flat, as codes; ``first`` is the number of their first element in the whole moment.

    ``step`` chooses the dither; None rounds to nearest. What was decoded is encoded again without loss, either way.
    """
    count = values.numel()
    bits = (values.view(torch.int32) & _ABS).clamp(max=_LARGEST_BITS)
    padded = torch.nn.functional.pad(bits, (0, -count % BLOCK)).view(-1, BLOCK)
    exponents = ((padded.amax(1) + ((1 << _SHIFT) - 1)) >> 23).clamp(min=_LEAST_EXPONENT)
    base = _bases(exponents, signed=signed).repeat_interleave(BLOCK)[:count]
    dither: Tensor | int = 1 << (_SHIFT - 1)
    if step is not None:
        of_element, of_step = _WEYL[signed]
        numbers = torch.arange(first, first + count, dtype=torch.int64, device=values.device)
        dither = (((numbers * of_element + step * of_step) & 0xFFFFFFFF) >> (32 - _SHIFT)).to(torch.int32)
    x = bits.view(torch.float32)
    a = (x + torch.maximum(x, base.view(torch.float32))).view(torch.int32)
    codes = (a + dither - base) >> _SHIFT
    if signed:
        codes = codes.clamp(max=127)
        codes = torch.where((values < 0) & (codes > 0), codes | 128, codes)
    else:
        codes = torch.where(values > 0, codes.clamp(min=1), codes).clamp(max=255)
    blocks.codes.copy_(codes)
    blocks.exponents.copy_(exponents)


def _bases(exponents: Tensor, *, signed: bool) -> Tensor:
    return (exponents.to(torch.int32).clamp(min=_LEAST_EXPONENT) - _BINADES[signed]) << 23
