"""The Triton kernel on numbers that are not finite, or extreme, and the interpreter's fma."""

import ctypes
import ctypes.util
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.optim.test_adamw_on_device import (
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    assert_same_bits,
    copy_of,
    master,
    on_host,
    segment,
    tensors,
)

pytest.importorskip("triton", reason="needs triton: pip install triton")

from tests.optim.interpreted import filled, fma


@WEIGHTS
@MOMENTS
@pytest.mark.parametrize("squares", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_the_squares_are_not_finite_nothing_changes(dtype, squares, states, weight, update):
    mine = filled(segment((330,), weight, "fp32", states, step=3))
    before = copy_of(mine)
    for shape in ((), (1,)):
        there = torch.full(shape, squares, dtype=dtype)
        update(mine, squares=there)
        assert_same_bits(mine, before)
        assert there.isnan().all() if math.isnan(squares) else (there == squares).all()


@MOMENTS
@pytest.mark.parametrize("squares", [0.0, 3.5, 1e300])
def test_where_the_squares_are_finite_the_step_is_taken_to_the_bit(squares, states, update):
    asked, plain = (filled(segment((330,), states=states, step=3)) for _ in range(2))
    update(asked, squares=torch.tensor(squares, dtype=torch.float64))
    update(plain)
    assert_same_bits(asked, plain)
    assert not torch.equal(plain.weight, segment((330,)).weight)


def bits_with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits, of every NaN the same: which bits a NaN has is each machine's own."""
    if not tensor.is_floating_point():
        return tensor
    kind = torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32
    return torch.where(tensor.isnan(), torch.tensor(math.nan, dtype=tensor.dtype), tensor).view(kind)


@WEIGHTS
@GRADIENTS
@MOMENTS
def test_gradients_that_are_not_finite_give_the_hosts_numbers(states, grad, weight, update):
    mine = filled(segment((200,), weight, grad, states, step=3))
    mine.grad[3], mine.grad[70], mine.grad[150] = math.nan, math.inf, -math.inf
    if mine.grad_remainder is not None:
        mine.grad_remainder[[3, 70, 150]] = 0
    mine.weight[9] = math.nan
    if mine.remainder is not None:
        mine.remainder[9] = 0x123  # low bits that an operation passes on, and a split float has no room for
    theirs = copy_of(mine)
    update(mine)
    on_host(theirs)
    assert master(mine).isnan().sum() == (2 if states == "8bit" else 4)
    for name, one in tensors(mine).items():
        assert torch.equal(bits_with_one_nan(one), bits_with_one_nan(tensors(theirs)[name])), name
    if mine.remainder is not None:
        assert not mine.remainder[master(mine).isnan()].any()


@WEIGHTS
@MOMENTS
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e-39, 1e-30, 3e-23, 1e-8, 3e19, 2e38, -2e38, 3.4e38])
def test_extreme_gradients_give_the_hosts_bits(value, states, weight, update):
    mine, theirs = (segment((130,), weight, states=states) for _ in range(2))
    for step in (1, 2, 3):
        for one, kernel in ((mine, update), (theirs, on_host)):
            kernel(replace(one, grad=torch.full((130,), value), step=step))
        assert_same_bits(mine, theirs, f"step {step}")


@pytest.mark.parametrize("grad_scale", [1e-20, 1e-8, 3.0, 7e12])
def test_any_scale_of_the_gradient_gives_the_hosts_bits(grad_scale, update):
    mine, theirs = (filled(segment((130,), grad_scale=grad_scale)) for _ in range(2))
    for one, kernel in ((mine, update), (theirs, on_host)):
        kernel(replace(one, grad=one.grad / grad_scale))
    assert_same_bits(mine, theirs)


def test_denormal_weights_and_moments_give_the_hosts_bits(update):
    mine = segment((512,), step=5)
    for tensor, scale in ((mine.weight, 1e-38), (mine.exp_avg, 1e-39), (mine.exp_avg_sq, 1e-39), (mine.grad, 1e-38)):
        tensor.copy_(torch.randn(512, generator=torch.Generator().manual_seed(1)) * scale)
    mine.exp_avg_sq.abs_()
    theirs = copy_of(mine)
    update(mine)
    on_host(theirs)
    assert_same_bits(mine, theirs)
    assert mine.exp_avg.any() and mine.exp_avg_sq.any()
    assert mine.weight.abs().median() > 1e-33


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**-60, 2.0**62])
def test_the_interpreters_fma_is_the_c_librarys(scale):
    """Of numbers whose sums cancel, are denormal or infinite, or are ties but for the last bits of the product."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    random, count = np.random.default_rng(0), 10_000
    x, y = (random.standard_normal((2, count)) * scale).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        z = -x * y * random.choice(np.float32([1, 1 + 2**-12, 2**-24, -(2**-25), 2**12, 2**24, 2**25]), count)
        z[::50], z[1::50], x[2::50] = np.inf, np.nan, 0
        little = 2.0 ** -random.integers(15, 24, count) * random.choice([-1, 1], count)
        x, y = np.append(x, (1 + little) * scale), np.append(y, (1 - little) * scale * 2**-24)
        x, y, z = np.float32(x), np.float32(y), np.float32(np.append(z, random.uniform(1, 2, count) * scale**2))
        got, twice = fma(x, y, z), x * y + z
        from_float64 = (x.astype(np.float64) * y + z).astype(np.float32)
    expected = np.float32([fmaf(*map(float, numbers)) for numbers in zip(x, y, z, strict=True)])
    np.testing.assert_array_equal(got, expected)
    for other in (twice, from_float64):  # the comparison can fail
        assert ((other != expected) & np.isfinite(expected)).sum() > 1000
