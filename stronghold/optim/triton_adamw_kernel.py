"""The kernel of AdamW in the Triton language, for segments of which :mod:`stronghold.optim.triton_adamw` launches it.

The arithmetic is that of ``csrc/adamw.h``, fp32 with the same operations in the same order, and so are the results, bit
for bit. The compiler fuses none; with fp32 moments those that the host fuses are fused here, too. Tillet, Kung and Cox,
"Triton: an intermediate language and compiler for tiled neural network computations" (MAPL 2019).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stronghold.native import BLOCK
from stronghold.optim.triton_formats import (
    FIRST_BINADES,
    FIRST_FACTOR,
    SECOND_BINADES,
    SECOND_FACTOR,
    decode,
    encode,
    float_of,
    load_floats,
    magnitude,
    store_floats,
)
from stronghold.optim.triton_rounding import quotient, square_root

_BLOCK = tl.constexpr(BLOCK)
_FIRST = 2**62 + 1
_FIRST_NUMBER = tl.constexpr(_FIRST)


def number_of(address: int) -> int:
    """Returns an address as the kernel takes it in a tuple: as an odd number of 63 bits.

    Triton compiles anew for numbers that fit into 32 bits, and by which of them 16 divides.
    """
    return _FIRST + 2 * address


@triton.jit
def address_of(number):
    """Returns what :func:`number_of` has made a number of."""
    return (number - _FIRST_NUMBER) >> 1


@triton.jit
def _nth(addresses, n, COUNT: tl.constexpr):
    """Returns the address of segment ``n``."""
    found = addresses[0]
    for other in tl.static_range(1, COUNT):
        found = tl.where(n == other, addresses[other], found)
    return address_of(found)


@triton.jit
def _pointer(addresses, n, dtype: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Returns where numbers of segment ``n`` begin."""
    return tl.multiple_of(_nth(addresses, n, COUNT).to(tl.pointer_type(dtype)), WIDE)


@triton.jit(do_not_specialize=["first_start", "second_start"])
def adamw_of_segments(
    weights,
    ends,
    remainders,
    grads,
    grad_remainders,
    first,
    first_exponents,
    second,
    second_exponents,
    squares,
    beta1,
    beta1_low,
    new1,
    new1_low,
    beta2,
    beta2_low,
    new2,
    new2_low,
    decay,
    decay_low,
    step_size,
    step_size_low,
    eps,
    grad_scale,
    denom_scale,
    first_start,
    second_start,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDE: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Updates the elements of one program, which are one segment's. Without exponents the moments are fp32.

    Of ``COUNT`` segments each has the next programs: as many as its elements take.
    """
    OF_ONE: tl.constexpr = WEIGHT.primitive_bitwidth // 8
    program = tl.program_id(0)
    n, begin, next_begin = 0, 0, 0
    for other in tl.static_range(COUNT):
        count = (address_of(ends[other]) - address_of(weights[other])) // OF_ONE
        here = (program >= next_begin) & (count > 0)
        n = tl.where(here, other, n)
        begin = tl.where(here, next_begin, begin)
        next_begin += ((count + ROWS * _BLOCK - 1) // (ROWS * _BLOCK)).to(tl.int32)
    if squares is not None:
        number = tl.load(_pointer(squares, n, SQUARES, COUNT, 1))
        if not (tl.abs(number) < float("inf")):
            return
    # int64: a parameter may have 2 ** 31 elements and more.
    elements = tl.multiple_of((_nth(ends, n, COUNT) - _nth(weights, n, COUNT)) // OF_ONE, WIDE)
    weight = _pointer(weights, n, WEIGHT, COUNT, WIDE)
    remainder = None if remainders is None else _pointer(remainders, n, tl.int16, COUNT, WIDE)
    grad = _pointer(grads, n, GRAD, COUNT, WIDE)
    grad_remainder = None if grad_remainders is None else _pointer(grad_remainders, n, tl.int16, COUNT, WIDE)
    MOMENT: tl.constexpr = tl.float32 if first_exponents is None else tl.uint8
    exp_avg = _pointer(first, n, MOMENT, COUNT, WIDE)
    exp_avg_exponents = None if first_exponents is None else _pointer(first_exponents, n, tl.uint8, COUNT, WIDE)
    exp_avg_sq = _pointer(second, n, MOMENT, COUNT, WIDE)
    exp_avg_sq_exponents = None if second_exponents is None else _pointer(second_exponents, n, tl.uint8, COUNT, WIDE)

    row = (program - begin).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = row * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = at < elements
    w = load_floats(weight, remainder, at, inside)
    g = load_floats(grad, grad_remainder, at, inside)
    if exp_avg_exponents is None:
        m = tl.load(exp_avg + at, mask=inside, other=0)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0)
        g = g * grad_scale
        m = tl.fma(beta1, m, tl.fma(new1, g, tl.fma(new1_low, g, beta1_low * m)))
        v = tl.fma(tl.fma(new2, g, new2_low * g), g, tl.fma(beta2, v, beta2_low * v))
        ratio = quotient(m, square_root(v) + eps)
        w = tl.fma(decay, w, tl.fma(step_size, ratio, tl.fma(step_size_low, ratio, decay_low * w)))
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
    else:
        filled = row * _BLOCK < elements
        m_code = tl.load(exp_avg + at, mask=inside, other=0).to(tl.int32)
        m_exponent = tl.load(exp_avg_exponents + row, mask=filled, other=0)
        m = float_of(decode(m_code & 0x7F, m_exponent, FIRST_BINADES) | ((m_code & 0x80) << 24))
        v_code = tl.load(exp_avg_sq + at, mask=inside, other=0).to(tl.int32)
        v_exponent = tl.load(exp_avg_sq_exponents + row, mask=filled, other=0)
        v = float_of(decode(v_code, v_exponent, SECOND_BINADES))

        g = g * grad_scale
        m = beta1 * m + new1 * g
        v_bits = magnitude(beta2 * v + new2 * (g * g))
        denominator = square_root(float_of(v_bits)) * denom_scale + eps
        w = w * decay - quotient(step_size * m, denominator)

        m_code, m_exponent = encode(magnitude(m), at, first_start, FIRST_FACTOR, FIRST_BINADES)
        m_code = tl.minimum(m_code, 127)
        m_code = tl.where((m < 0) & (m_code > 0), m_code | 0x80, m_code)
        tl.store(exp_avg + at, m_code.to(tl.uint8), mask=inside)
        tl.store(exp_avg_exponents + row, m_exponent.to(tl.uint8), mask=filled)
        v_code, v_exponent = encode(v_bits, at, second_start, SECOND_FACTOR, SECOND_BINADES)
        v_code = tl.maximum(tl.minimum(v_code, 255), tl.minimum(v_bits, 1))  # never 0 unless the moment is
        tl.store(exp_avg_sq + at, v_code.to(tl.uint8), mask=inside)
        tl.store(exp_avg_sq_exponents + row, v_exponent.to(tl.uint8), mask=filled)
    store_floats(weight, remainder, at, inside, w)
