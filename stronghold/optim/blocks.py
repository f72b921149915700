"""Moments in eight bits: codes that are cut from floating-point numbers, 64 to a shared exponent.

A block of 64 neighbours shares one exponent, a power of two, as in the Open Compute Project's Microscaling formats
(MX v1.0, 2023); that moments keep their worth when each block has a scale of its own is Dettmers, Lewis, Shleifer and
Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022). Below the block's exponent each number has its
own, of four bits, so that what is 2 ** 15 times smaller than the block's largest number still has a code:

- the first moment: a sign, four bits of exponent, three of mantissa;
- the second: four bits of exponent, four of mantissa, and never zero unless it is zero, so that no update divides by
  a moment that was lost.

With fp32 bits ``a`` of the magnitude and the block's exponent ``E``, the code is ``(a + dither - base) >> shift`` with
``base = (E - 15) << 23``. A moment changes by less in a step than its last bit (a second moment by a thousandth, with
beta2 = 0.999), and rounding to nearest would lose every such change. So the rounding is dithered, by a Weyl sequence
over elements and steps (H. Weyl, 1916): without bias, evenly spread over the steps, and the same on every machine.

This is the same arithmetic as in csrc/formats.h, in torch, for state dictionaries and for other devices than the CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stronghold.native import BLOCK, Blocks

_LARGEST = {True: 0x7F700000, False: 0x7F780000}
"""The bits of the largest number that has a code, by whether the moment is signed."""
LARGEST_SECOND = 1.9375 * 2.0**127
"""The same for the second moment, as a number."""
_SHIFT = {True: 20, False: 19}
_WEYL = {True: (0x85EBCA6B, 0x6A09E667), False: (0xC2B2AE35, 0x9E3779B9)}
_ABS = 0x7FFFFFFF


def exponents_of(elements: int) -> int:
    """Returns how many shared exponents, of a byte each, ``elements`` numbers have."""
    return math.ceil(elements / BLOCK)


def decode(blocks: Blocks, *, signed: bool) -> Tensor:
    """Returns the fp32 numbers, flat, that the first moment's (``signed``) or the second's codes stand for."""
    codes = blocks.codes.to(torch.int32)
    base = _bases(blocks.exponents).repeat_interleave(BLOCK)[: codes.numel()]
    magnitude = codes & 127 if signed else codes
    values = torch.where(magnitude == 0, 0, base + (magnitude << _SHIFT[signed])).view(torch.float32)
    return torch.where(codes >= 128, -values, values) if signed else values


def encode(values: Tensor, blocks: Blocks, *, signed: bool, step: int | None, first: int = 0) -> None:
    """Writes fp32 ``values``, flat, as codes; ``first`` is the number of their first element in the whole moment.

    ``step`` chooses the dither; None rounds to nearest. What was decoded is encoded again without loss, either way.
    """
    count, shift = values.numel(), _SHIFT[signed]
    bits = (values.view(torch.int32) & _ABS).clamp(max=_LARGEST[signed])
    padded = torch.nn.functional.pad(bits, (0, -count % BLOCK)).view(-1, BLOCK)
    exponents = ((padded.amax(1) + ((1 << shift) - 1)) >> 23).clamp(min=16)
    base = _bases(exponents).repeat_interleave(BLOCK)[:count]
    dither: Tensor | int = 1 << (shift - 1)
    if step is not None:
        of_element, of_step = _WEYL[signed]
        numbers = torch.arange(first, first + count, dtype=torch.int64, device=values.device)
        dither = (((numbers * of_element + step * of_step) & 0xFFFFFFFF) >> (32 - shift)).to(torch.int32)
    codes = (bits + dither - base) >> shift
    if signed:
        codes = codes.clamp(0, 127)
        codes = torch.where((values < 0) & (codes > 0), codes | 128, codes)
    else:
        codes = torch.where(values > 0, codes.clamp(min=1), codes.clamp(min=0)).clamp(max=255)
    blocks.codes.copy_(codes)
    blocks.exponents.copy_(exponents)


def _bases(exponents: Tensor) -> Tensor:
    return (exponents.to(torch.int32).clamp(min=16) - 15) << 23
