"""How numbers lie in a device's memory, for kernels in the Triton language: the rules of ``csrc/formats.h``.

Integer arithmetic on the bits, and for 8-bit moments sums of two fp32 numbers, so that each bit is the host's.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_BINADES = tl.constexpr(6)
SECOND_BINADES = tl.constexpr(14)
FIRST_FACTOR = tl.constexpr(0x85EBCA6B)
SECOND_FACTOR = tl.constexpr(0xC2B2AE35)
_SHIFT = tl.constexpr(19)
_BELOW_A_CODE = tl.constexpr(2**19 - 1)
_DITHER_SHIFT = tl.constexpr(32 - 19)
_LEAST_EXPONENT = tl.constexpr(20)
_LARGEST = tl.constexpr(0x7B780000)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def load_floats(data, remainder, at, inside):
    """Returns fp32 numbers, loaded from fp32, bf16 (given as int16) or, with a remainder, both their halves."""
    values = tl.load(data + at, mask=inside, other=0)
    if data.dtype.element_ty == tl.int16:
        bits = values.to(tl.int32) << 16
        if remainder is not None:
            bits += tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        values = float_of(bits)
    return values


@triton.jit
def store_floats(data, remainder, at, inside, values):
    """Stores fp32 numbers, with a remainder as their halves; the low half of a NaN is 0."""
    if remainder is not None:
        bits = bits_of(values)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        tl.store(data + at, high.to(tl.int16), mask=inside)
        tl.store(remainder + at, tl.where(nan, 0, bits).to(tl.int16), mask=inside)
    else:
        tl.store(data + at, values, mask=inside)


@triton.jit
def magnitude(values):
    """Returns the bits of the magnitude; of a NaN, and of what is larger, those of the largest that has a code."""
    return tl.minimum(bits_of(values) & 0x7FFFFFFF, _LARGEST)


@triton.jit
def decode(code, exponent, BINADES: tl.constexpr):
    """Returns the bits of the magnitudes that codes stand for; ``exponent`` is that of each row."""
    base = (tl.maximum(exponent.to(tl.int32), _LEAST_EXPONENT) - BINADES) << 23
    y = base + (code << _SHIFT)
    return tl.minimum(bits_of(float_of(y) - float_of(base)), y - (1 << 23))


@triton.jit
def encode(x, at, start, FACTOR: tl.constexpr, BINADES: tl.constexpr):
    """Returns the codes, not yet limited, of magnitudes given as bits, and the exponent of each row.

    ``at`` are the elements' numbers, and ``start`` is what the dither's sequence adds for them all.
    """
    exponent = tl.maximum((tl.max(x, axis=1, keep_dims=True) + _BELOW_A_CODE) >> 23, _LEAST_EXPONENT)
    base = (exponent - BINADES) << 23
    dither = (at.to(tl.uint32) * FACTOR + start.to(tl.uint32)) >> _DITHER_SHIFT
    a = bits_of(float_of(x) + float_of(tl.maximum(x, base)))
    return (a - base + dither.to(tl.int32)) >> _SHIFT, exponent
