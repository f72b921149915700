"""The lossless split of fp32, over every exponent, both signs, subnormals and ties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stronghold.split import join, rounded, split


def halves(values):
    weight, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, weight, remainder)
    return weight, remainder


def of_bits(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def bits_of(values):
    return values.numpy().view(np.uint32)


def every_exponent(sign, mantissas):
    exponents = np.arange(256, dtype=np.uint32) << 23
    return of_bits((np.uint32(sign << 31) | exponents[:, None] | np.asarray(mantissas, dtype=np.uint32)).ravel())


# Around every cut that matters: ties (0x8000), their neighbours, both ends of the low half, even and odd bf16s.
MANTISSAS = sorted(
    {
        (high << 16 | low) & 0x7FFFFF
        for high in (0, 1, 2, 3, 0x3F, 0x40, 0x7E, 0x7F)
        for low in (0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
    }
)


def nearest_away(value: float) -> float:
    """The nearest bf16 number by arithmetic in float64, ties away from zero, written without bits."""
    if value == 0 or not np.isfinite(value):
        return value
    _, exponent = np.frexp(value)
    unit = np.ldexp(1.0, max(int(exponent) - 8, -133))  # of 8 significant bits; the smallest bf16 is 2 ** -133
    result = np.sign(value) * np.floor(abs(value) / unit + 0.5) * unit
    return result if abs(result) < 2.0**128 else np.copysign(np.inf, value)


@pytest.mark.parametrize("sign", [0, 1])
def test_every_exponent_comes_back_bit_for_bit_and_its_weight_is_the_nearest(sign):
    values = every_exponent(sign, MANTISSAS)
    weight, remainder = halves(values)
    number = ~values.isnan()
    assert number.sum() > 255 * len(MANTISSAS)
    assert np.array_equal(bits_of(join(weight, remainder))[number.numpy()], bits_of(values)[number.numpy()])
    expected = torch.tensor([nearest_away(float(value)) for value in values[number].double()], dtype=torch.float64)
    assert torch.equal(weight[number].double(), expected)
    assert torch.equal(weight[number].signbit(), values[number].signbit())


@pytest.mark.parametrize("sign", [0, 1])
def test_a_nan_stays_one_in_both_halves(sign):
    values = every_exponent(sign, MANTISSAS)
    values = values[values.isnan()]
    weight, remainder = halves(values)
    assert len(values) > 10
    assert weight.isnan().all()
    assert join(weight, remainder).isnan().all()
    again = halves(join(weight, remainder))
    assert torch.equal(again[0].view(torch.int16), weight.view(torch.int16))
    assert torch.equal(again[1], remainder)


def test_every_low_half_of_some_numbers():
    low = np.arange(1 << 16, dtype=np.uint32)
    for high in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F):
        values = of_bits(np.uint32(high << 16) | low)
        assert np.array_equal(bits_of(join(*halves(values))), bits_of(values)), hex(high)


def test_but_for_ties_the_weight_is_torchs_own_rounding():
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded(values)[~tie], values.bfloat16()[~tie])
    assert torch.equal(rounded(of_bits([0x3F808000, 0xBF828000])), torch.tensor([1.0078125, -1.0234375]).bfloat16())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits(bits):
    values = of_bits(bits)
    weight, remainder = halves(values)
    back = join(weight, remainder)
    nan = values.isnan()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(weight.isnan(), nan)
    assert np.array_equal(bits_of(back)[~nan.numpy()], bits_of(values)[~nan.numpy()])


def test_shapes_and_strides_are_kept():
    values = torch.randn(3, 5)
    weight, remainder = halves(values)
    assert weight.shape == remainder.shape == (3, 5)
    assert torch.equal(join(weight.t(), remainder.t()), values.t())
