"""8-bit moments against numpy: every code, the update, and that rounding neither drifts nor sticks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stronghold import native
from stronghold.native import Blocks, Segment
from tests.native_cases import CHUNK, ISAS, SETTINGS, as_numpy, copy_of, segment
from tests.native_reference import FIRST, SECOND, Moment, State, adamw_8bit, level

LENGTHS = (1, 15, 63, 64, 65, 130, CHUNK + 1)


def blocks(codes: np.ndarray, exponents: np.ndarray) -> Blocks:
    return Blocks(codes=torch.from_numpy(codes.copy()), exponents=torch.from_numpy(exponents.copy()))


def run(state: State, grad: np.ndarray, *, isa: str, **settings) -> State:
    """Returns what the kernel makes of ``state``."""
    s = Segment(
        weight=torch.from_numpy(state.weight.copy()),
        grad=torch.from_numpy(grad.copy()),
        exp_avg=blocks(*state.exp_avg),
        exp_avg_sq=blocks(*state.exp_avg_sq),
        **settings,
    )
    native.adamw([s], threads=2, isa=isa)
    return State(weight=s.weight.numpy(), exp_avg=as_numpy(s.exp_avg), exp_avg_sq=as_numpy(s.exp_avg_sq))


def assert_same(got: State, expected: State) -> None:
    """Asserts the same bits; any NaN is as good as another."""
    np.testing.assert_array_equal(got.exp_avg[1], expected.exp_avg[1], "exponents of exp_avg")
    np.testing.assert_array_equal(got.exp_avg[0], expected.exp_avg[0], "codes of exp_avg")
    np.testing.assert_array_equal(got.exp_avg_sq[1], expected.exp_avg_sq[1], "exponents of exp_avg_sq")
    np.testing.assert_array_equal(got.exp_avg_sq[0], expected.exp_avg_sq[0], "codes of exp_avg_sq")
    number = ~np.isnan(expected.weight)
    np.testing.assert_array_equal(np.isnan(got.weight), ~number, "weights that are NaN")
    np.testing.assert_array_equal(got.weight.view(np.int32)[number], expected.weight.view(np.int32)[number], "weights")


def random_state(n: int, rng: np.random.Generator) -> State:
    count = -(-n // native.BLOCK)
    return State(
        weight=rng.standard_normal(n).astype(np.float32),
        exp_avg=(rng.integers(0, 256, n, dtype=np.uint8), rng.integers(0, 247, count, dtype=np.uint8)),
        exp_avg_sq=(rng.integers(0, 256, n, dtype=np.uint8), rng.integers(0, 247, count, dtype=np.uint8)),
    )


def zero_state(n: int) -> State:
    count = -(-n // native.BLOCK)
    zeros = np.zeros(n, dtype=np.uint8), np.zeros(count, dtype=np.uint8)
    return State(weight=np.zeros(n, dtype=np.float32), exp_avg=zeros, exp_avg_sq=zeros)


# ---- the update and the codes ----


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_update_is_the_references_bit_for_bit(isa, n):
    rng = np.random.default_rng(n)
    for step, scale in ((1, 1.0), (2, 0.37), (1000, 1.0), (5_000_000_000, 1.0)):
        grad = (rng.standard_normal(n) * 10 ** rng.uniform(-25, 10, n)).astype(np.float32)
        grad[rng.random(n) < 0.02] = 0.0
        settings = SETTINGS | {"step": step, "grad_scale": scale}
        state = random_state(n, rng)
        assert_same(run(state, grad, isa=isa, **settings), adamw_8bit(state, grad, **settings))


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_under_every_exponent_is_decoded_as_the_reference_does(isa):
    # The largest exponent that encoding gives is 246. Gradients of zero: what moves the weight is what was stored.
    codes = np.tile(np.arange(256, dtype=np.uint8), 247)
    exponents = np.repeat(np.arange(247, dtype=np.uint8), 256 // native.BLOCK)
    n = len(codes)
    rng = np.random.default_rng(0)
    shuffled = rng.permuted(codes.reshape(-1, 256), axis=1).reshape(-1)  # other pairs of m and v
    grad = np.zeros(n, dtype=np.float32)
    for second in (codes, shuffled):
        state = State(weight=np.zeros(n, dtype=np.float32), exp_avg=(codes, exponents), exp_avg_sq=(second, exponents))
        settings = SETTINGS | {"step": 3, "lr": 1.0}
        assert_same(run(state, grad, isa=isa, **settings), adamw_8bit(state, grad, **settings))


@pytest.mark.parametrize("isa", ISAS)
def test_gradients_of_every_magnitude_and_none_are_encoded_as_the_reference_does(isa):
    every = np.arange(-149, 128)
    grad = np.concatenate([np.ldexp(np.float32(1.37), every), -np.ldexp(np.float32(1.9), every)]).astype(np.float32)
    special = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, np.float32(2.0**-126)]
    grad = np.concatenate([grad, np.zeros(70), np.repeat(special, 64), np.full(64, 1e-42), special]).astype(np.float32)
    n = len(grad)
    for settings in (SETTINGS, SETTINGS | {"beta1": 0.0, "beta2": 0.0}):
        for step in (1, 7):
            state = replace(zero_state(n), weight=np.ones(n, dtype=np.float32))
            assert_same(
                run(state, grad, isa=isa, step=step, **settings), adamw_8bit(state, grad, step=step, **settings)
            )


def test_freshly_zeroed_memory_is_a_moment_of_zeros():
    zeros = np.zeros(64, dtype=np.uint8)
    for moment in (FIRST, SECOND):
        assert (moment.decode(zeros, np.zeros(1, dtype=np.uint8)) == 0).all()
    # And the first step from it is the first step in float32, to the rounding of float32 arithmetic.
    fp32 = segment(1000, step=1)
    for tensor in (fp32.exp_avg, fp32.exp_avg_sq):
        tensor.zero_()
    fresh = Blocks(codes=torch.zeros(1000, dtype=torch.uint8), exponents=torch.zeros(16, dtype=torch.uint8))
    other = Blocks(codes=torch.zeros(1000, dtype=torch.uint8), exponents=torch.zeros(16, dtype=torch.uint8))
    eight = replace(copy_of(fp32), exp_avg=fresh, exp_avg_sq=other)
    native.adamw([fp32, eight], threads=1)
    torch.testing.assert_close(eight.weight, fp32.weight, rtol=1e-6, atol=1e-9)


# ---- what was stored stays ----


@pytest.mark.parametrize("isa", ISAS)
def test_what_has_a_code_is_encoded_as_itself_whatever_the_dither(isa):
    state = random_state(4096 + 13, np.random.default_rng(0))
    grad = np.zeros(4096 + 13, dtype=np.float32)
    m, v = FIRST.decode(*state.exp_avg), SECOND.decode(*state.exp_avg_sq)
    for step in range(1, 40):  # betas of 1 keep the moments
        state = run(state, grad, isa=isa, step=step, **SETTINGS | {"beta1": 1.0, "beta2": 1.0})
        np.testing.assert_array_equal(FIRST.decode(*state.exp_avg), m)
        np.testing.assert_array_equal(SECOND.decode(*state.exp_avg_sq), v)


def test_a_second_moment_that_is_not_zero_never_becomes_zero():
    grad = np.full(64, 1e-20, dtype=np.float32)
    grad[5], grad[6] = 1.0, 0.0
    state = zero_state(64)
    for step in range(1, 30):
        state = run(state, grad, isa="auto", step=step, **SETTINGS)
        v = SECOND.decode(*state.exp_avg_sq)
        assert v[6] == 0.0
        assert (np.delete(v, 6) > 0).all()


# ---- dither ----


def test_a_small_steady_gradient_keeps_half_of_its_momentum_beside_a_large_one():
    """Its first moment, an eighth of its block's smallest number, is now that and now zero, where it could be lost.

    Independent random numbers would keep all of it; that evenly spread ones favour zero here is their price.
    """
    grad = np.full(64, 2.0**-13, dtype=np.float32)
    grad[0] = 1.0
    state, total, steps, skipped = zero_state(64), np.zeros(64), 1100, 100
    for step in range(1, steps + 1):
        state = run(state, grad, isa="auto", step=step, **SETTINGS | {"beta1": 0.9})
        if step > skipped:
            total += FIRST.decode(*state.exp_avg)
    kept = total / (steps - skipped) / grad
    assert kept[0] == 1.0
    assert kept[1:].min() > 0.4
    assert kept[1:].max() < 1.1


def distance_in_codes(moment: Moment, value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return (level(np.abs(value.astype(np.float64))) - level(np.abs(exact))) * 2**moment.mantissa


def test_a_moment_follows_changes_far_below_one_code():
    """A moment moves by a thousandth of the way a step, a fiftieth of a code and less; nearest rounding would stick."""
    n, steps, beta = 4096, 2000, 0.999
    rng = np.random.default_rng(0)
    grad = (rng.choice([-1, 1], n) * 10 ** rng.uniform(-3.5, -3, n)).astype(np.float32)
    state = zero_state(n)
    m, v = np.zeros(n), np.zeros(n)
    m_nearest, v_nearest = np.zeros(n), np.zeros(n)
    for step in range(1, steps + 1):
        state = run(state, grad, isa="auto", step=step, **SETTINGS | {"beta1": beta, "beta2": beta})
        m, v = beta * m + (1 - beta) * grad, beta * v + (1 - beta) * grad.astype(np.float64) ** 2
        new = (beta * m_nearest + (1 - beta) * grad).astype(np.float32)
        m_nearest = FIRST.decode(*FIRST.encode(new, step, dither=False)).astype(np.float64)
        new = (beta * v_nearest + (1 - beta) * grad.astype(np.float64) ** 2).astype(np.float32)
        v_nearest = SECOND.decode(*SECOND.encode(new, step, dither=False)).astype(np.float64)
    for moment, stored, exact, nearest in (
        (FIRST, state.exp_avg, m, m_nearest),
        (SECOND, state.exp_avg_sq, v, v_nearest),
    ):
        value = moment.decode(*stored)
        assert np.array_equal(np.sign(value), np.sign(exact))
        distance = distance_in_codes(moment, value, exact)
        assert np.abs(distance).max() < 2.5
        assert abs(distance.mean()) < 0.5
        assert distance_in_codes(moment, nearest, exact).max() < -8


def test_the_step_of_the_dither_wraps_as_uint32():
    n = CHUNK + 7
    state, grad = random_state(n, np.random.default_rng(1)), np.zeros(n, dtype=np.float32)
    settings = SETTINGS | {"beta1": 0.999, "lr": 0.0}
    early, late = (run(state, grad, isa="auto", step=step, **settings) for step in (5, 2**32 + 5))
    assert_same(early, late)
    assert not np.array_equal(early.exp_avg[0], run(state, grad, isa="auto", step=6, **settings).exp_avg[0])


def test_fifty_steps_stay_near_those_with_float32_moments():
    n = 2000
    exact = segment(n, step=1, weight_decay=0.0)
    eight = copy_of(exact)
    zeros = [torch.zeros(n), torch.zeros(n)]
    exact = replace(exact, exp_avg=zeros[0], exp_avg_sq=zeros[1])
    fresh = zero_state(n)
    eight = replace(eight, exp_avg=blocks(*fresh.exp_avg), exp_avg_sq=blocks(*fresh.exp_avg_sq))
    start = exact.weight.clone()
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 51):
        grad = torch.randn(n, generator=generator) * 0.1
        for s in (exact, eight):
            native.adamw([replace(s, grad=grad, step=step)], threads=1)
    moved, apart = (exact.weight - start).norm(), (eight.weight - exact.weight).norm()
    assert apart < 0.1 * moved
