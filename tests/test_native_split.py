"""A weight, or a gradient, in two halves is the float32 number that they hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stronghold import native
from stronghold.native import Segment
from tests.native_cases import (
    CHUNK,
    GRADS,
    ISAS,
    SETTINGS,
    all_patterns,
    assert_same_bits,
    bits,
    copy_of,
    joined,
    segment,
    split,
    weight_of,
)
from tests.native_reference import nearest_bf16


def numbers() -> Tensor:
    values = all_patterns()
    return values[~values.isnan()]


def stepped(weight: Tensor, remainder: Tensor | None, *, grad: Tensor | None = None, isa: str, **settings) -> Segment:
    """Returns the segment after a first step. Without a gradient and at a rate of zero it changes nothing."""
    n = weight.numel()
    s = Segment(
        weight=weight.clone(),
        remainder=None if remainder is None else remainder.clone(),
        grad=torch.zeros(n) if grad is None else grad,
        exp_avg=torch.zeros(n),
        exp_avg_sq=torch.zeros(n),
        step=1,
        **SETTINGS | settings,
    )
    native.adamw([s], threads=2, isa=isa)
    return s


def test_the_reference_rounds_as_torch_does_but_for_ties():
    values = numbers()
    tie = (bits(values) & 0xFFFF) == 0x8000
    nearest = torch.from_numpy(nearest_bf16(values.numpy()))
    assert torch.equal(bits(nearest[~tie]), bits(values[~tie].bfloat16().float()))
    toward_zero = (bits(values[tie]) & -0x10000).view(torch.float32)
    away = (2 * values[tie].double() - toward_zero.double()).float()
    assert torch.equal(bits(nearest[tie]), bits(away))


@pytest.mark.parametrize("isa", ISAS)
def test_every_number_and_infinity_comes_back_bit_for_bit(isa):
    values = numbers()
    high, low = split(values)
    assert torch.equal(bits(joined(high, low)), bits(values))
    after = stepped(high, low, isa=isa, lr=0.0)
    assert torch.equal(bits(after.weight), bits(high))
    assert torch.equal(after.remainder, low)


@pytest.mark.parametrize("isa", ISAS)
def test_every_number_is_updated_as_in_float32(isa):
    values = numbers()
    grad = torch.randn(values.numel(), generator=torch.Generator().manual_seed(0))
    whole = stepped(values, None, grad=grad, isa=isa, lr=1e-2)
    halves = stepped(*split(values), grad=grad, isa=isa, lr=1e-2)
    number = ~whole.weight.isnan()
    assert number.sum() > 400_000
    expected = split(whole.weight[number])
    assert torch.equal(bits(halves.weight[number]), bits(expected[0]))
    assert torch.equal(halves.remainder[number], expected[1])


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=70),
    isa=st.sampled_from(ISAS),
)
def test_any_numbers_come_back_bit_for_bit(values, isa):
    high, low = split(torch.tensor(values, dtype=torch.float32))
    after = stepped(high, low, isa=isa, lr=0.0)
    assert torch.equal(bits(after.weight), bits(high))
    assert torch.equal(after.remainder, low)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays_a_nan_of_its_sign_in_both_halves(isa):
    # Rounding would carry the largest payload to zero of the other sign, and leave the smallest an infinity.
    payloads = torch.tensor([1, 0x7FFF, 0x8000, 0x3FFFFF, 0x400000, 0x7F8000, 0x7FFFFF], dtype=torch.int32)
    patterns = torch.cat([payloads | 0x7F800000, payloads | -0x800000]).repeat(5)
    grad = patterns.view(torch.float32)
    assert grad.isnan().all()
    after = stepped(*split(torch.ones(grad.numel())), grad=grad, isa=isa)
    assert after.weight.isnan().all()
    assert (after.remainder == 0).all()
    assert joined(after.weight, after.remainder).isnan().all()
    # A weight that is NaN keeps its sign as well.
    high = torch.tensor([0x7FC0, -0x40, 0x7FFF, -1, 0x7F81, -0x7F], dtype=torch.int16).view(torch.bfloat16)
    after = stepped(high, torch.zeros(6, dtype=torch.int16), isa=isa)
    assert after.weight.isnan().all()
    assert torch.equal(after.weight.signbit(), high.signbit())
    assert (after.remainder == 0).all()


@pytest.mark.parametrize("place", [0, 7, 8, 15])
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_leaves_its_neighbours_alone(isa, place):
    values = torch.randn(48, generator=torch.Generator().manual_seed(0))
    grad = torch.zeros(48)
    grad[16 + place] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    after = stepped(*split(values), grad=grad, isa=isa, lr=1e-2, weight_decay=0.0)
    assert after.weight[16 + place].isnan()
    others = torch.arange(48) != 16 + place
    assert torch.equal(bits(weight_of(after)[others]), bits(values[others]))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_split_weight_is_updated_as_a_float32_weight(isa, grad, blocks):
    for n in (1, 15, 16, 17, 63, 64, 65, CHUNK + 1, 2 * CHUNK + 37):
        whole = segment(n, seed=n, grad=grad, blocks=blocks)
        halves = segment(n, seed=n, grad=grad, blocks=blocks, split_weight=True)
        native.adamw([whole], threads=2, isa=isa)
        native.adamw([halves], threads=2, isa=isa)
        expected = split(whole.weight)
        assert torch.equal(bits(halves.weight), bits(expected[0]))
        assert torch.equal(halves.remainder, expected[1])
        assert_same_bits(replace(whole, weight=halves.weight), replace(halves, remainder=None))


@pytest.mark.parametrize("isa", ISAS)
def test_a_split_gradient_is_its_float32_value(isa):
    whole, halves = segment(CHUNK + 77), segment(CHUNK + 77, grad="split")
    native.adamw([whole], threads=2, isa=isa)
    native.adamw([halves], threads=2, isa=isa)
    assert_same_bits(whole, replace(halves, grad=whole.grad, grad_remainder=None))


def test_a_hundred_steps_are_those_of_a_float32_weight():
    whole, halves = segment(1000, lr=1e-2), segment(1000, lr=1e-2, split_weight=True)
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 101):
        grad = torch.randn(1000, generator=generator) * 0.1
        for s in (whole, halves):
            native.adamw([replace(s, grad=grad, step=step)], threads=1)
    assert torch.equal(bits(weight_of(halves)), bits(whole.weight))
    assert np.array_equal(halves.weight.float().numpy(), nearest_bf16(whole.weight.numpy()))


def test_small_updates_are_not_lost():
    # Each is a two-thousandth of the distance between two bfloat16 numbers near 1.
    weight, remainder = split(torch.ones(10))
    for _ in range(100):
        after = stepped(weight, remainder, grad=torch.ones(10), isa="auto", lr=2.0**-18, weight_decay=0.0)
        weight, remainder = after.weight, after.remainder
    moved = 1 - weight_of(copy_of(after))
    torch.testing.assert_close(moved, torch.full((10,), 100 * 2.0**-18), rtol=1e-3, atol=0.0)
