"""Eight-bit moments in torch: code for code what the host's kernel writes, and true to the numbers they stand for."""

import numpy as np
import pytest
import torch

from stronghold import native
from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim.blocks import decode, encode, exponents_of
from tests.native_reference import FIRST, SECOND

SIZES = (1, 63, 64, 65, 1000)
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
F = np.float32


def blank(elements: int) -> Blocks:
    return Blocks(
        codes=torch.zeros(elements, dtype=torch.uint8),
        exponents=torch.zeros(exponents_of(elements), dtype=torch.uint8),
    )


def encoded(values: torch.Tensor, *, signed: bool, step: int | None) -> Blocks:
    blocks = blank(values.numel())
    encode(values, blocks, signed=signed, step=step)
    return blocks


def assert_same_codes(got: Blocks, expected: Blocks, where: str = "") -> None:
    assert torch.equal(got.codes, expected.codes), where
    assert torch.equal(got.exponents, expected.exponents), where


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def spread(n: int, low: float, high: float, seed: int = 0) -> torch.Tensor:
    """Returns numbers of both signs whose magnitudes lie evenly, by their exponents, between two powers of ten."""
    generator = torch.Generator().manual_seed(seed + n)
    exponents = torch.rand(n, generator=generator, dtype=torch.float64) * (high - low) + low
    signs = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (signs * 10.0**exponents).float()


def last_bits(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Returns how far the numbers that have codes lie apart where ``values`` are: a sixteenth of the binade, or of the
    least normal number's."""
    exponents = encoded(values, signed=signed, step=None).exponents.double().repeat_interleave(BLOCK)
    least = exponents - 127 - (6 if signed else 14)
    return 2.0 ** (torch.maximum(values.double().abs().log2().floor(), least) - 4)


def with_zeros(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values[::3] = 0.0
    values[1::7] = -0.0
    return values


GRADIENTS = {
    "usual": lambda n: spread(n, -8, 0),
    "wide": lambda n: spread(n, -40, 18),
    "tiny": lambda n: spread(n, -45, -36),
    "squares too small for float32": lambda n: spread(n, -30, -20),
    "squares too large for float32": lambda n: spread(n, 18.5, 38),
    "some zeros": lambda n: with_zeros(spread(n, -6, 3)),
    "zeros": lambda n: torch.zeros(n),
    "powers of two": lambda n: 2.0 ** torch.arange(n).remainder(60).sub(40).float(),
    "not finite": lambda n: torch.tensor([1.0, np.inf, -2.0, -np.inf, np.nan]).repeat(n // 5 + 1)[:n],
}
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def moments(segment: Segment, exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's first lines, operation by operation in float32 (csrc/adamw.h)."""
    beta1, beta2, g = segment.beta1, segment.beta2, segment.grad.numpy() * F(segment.grad_scale)
    with np.errstate(all="ignore"):
        m = F(beta1) * exp_avg + F(1 - beta1) * g
        v = F(beta2) * exp_avg_sq + F(1 - beta2) * (g * g)
    assert m.dtype == v.dtype == np.float32
    largest = F(1.9375 * 2.0**119)
    return m, np.where(v <= largest, v, largest)  # a NaN too becomes the largest


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_codes_are_those_that_the_kernel_writes(kind, elements):
    for step in (1, 2, 999, 2**24):
        exp_avg, exp_avg_sq = blank(elements), blank(elements)
        segment = Segment(
            weight=torch.zeros(elements),
            grad=GRADIENTS[kind](elements),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            step=step,
            grad_scale=0.7,
            **SETTINGS,
        )
        native.adamw([segment], threads=1)
        zeros = np.zeros(elements, np.float32)
        m, v = (torch.from_numpy(one) for one in moments(segment, zeros, zeros))
        assert_same_codes(encoded(m, signed=True, step=step), exp_avg, f"first moment, step {step}")
        assert_same_codes(encoded(v, signed=False, step=step), exp_avg_sq, f"second moment, step {step}")


@SIGNED
def test_next_to_a_power_of_two_exponents_and_codes_are_the_kernels(signed):
    """Where rounding up would leave the binade, the block takes the next exponent, and not a number sooner."""
    root = torch.arange(1, 255).repeat_interleave(BLOCK) << 23
    numbers = (root - (1 << 19) + torch.arange(-2, 5).repeat(len(root))[: len(root)]).to(torch.int32)
    alone = torch.arange(len(numbers)) % BLOCK == torch.arange(len(numbers)) // BLOCK % BLOCK
    values = torch.where(alone, numbers, 0).view(torch.float32)  # one a block: the others would hide its exponent
    for step in (1, 2, 3, 4):
        exp_avg, exp_avg_sq = blank(len(values)), blank(len(values))
        settings = {**SETTINGS, "beta1": 0.0, "beta2": 0.0}  # the moments are the gradient and its square
        grad = values if signed else values.sqrt()
        native.adamw(
            [Segment(weight=values * 0, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=step, **settings)],
            threads=1,
        )
        moment = grad if signed else grad * grad
        assert_same_codes(encoded(moment, signed=signed, step=step), exp_avg if signed else exp_avg_sq, f"step {step}")
        codes, exponents = (FIRST if signed else SECOND).encode(values.numpy(), step)
        expected = Blocks(codes=torch.from_numpy(codes), exponents=torch.from_numpy(exponents))
        assert_same_codes(encoded(values, signed=signed, step=step), expected, f"step {step}")


def test_step_after_step_the_codes_are_the_kernels():
    elements = 150_000  # three of the pieces that the kernel's threads take
    theirs, mine = [blank(elements), blank(elements)], [blank(elements), blank(elements)]
    for step in range(1, 9):
        segment = Segment(
            weight=torch.zeros(elements),
            grad=spread(elements, -9 + step % 7, step % 5, seed=step),
            exp_avg=theirs[0],
            exp_avg_sq=theirs[1],
            step=step,
            **SETTINGS,
        )
        native.adamw([segment], threads=2)
        m, v = moments(segment, decode(mine[0], signed=True).numpy(), decode(mine[1], signed=False).numpy())
        encode(torch.from_numpy(m), mine[0], signed=True, step=step)
        encode(torch.from_numpy(v), mine[1], signed=False, step=step)
        for got, expected in zip(mine, theirs, strict=True):
            assert_same_codes(got, expected, f"step {step}")


def every_code() -> Blocks:
    """All 256 codes under each exponent that a finite number can have, four blocks an exponent."""
    exponents = torch.arange(247).repeat_interleave(4).to(torch.uint8)
    return Blocks(codes=torch.arange(256).repeat(247).to(torch.uint8), exponents=exponents)


@SIGNED
def test_every_code_under_every_exponent_stands_for_the_number_that_the_format_says(signed):
    blocks = every_code()
    expected = (FIRST if signed else SECOND).decode(blocks.codes.numpy(), blocks.exponents.numpy())
    assert torch.equal(decode(blocks, signed=signed), torch.from_numpy(expected))


def test_the_kernel_reads_every_code_of_a_first_moment_as_the_same_number():
    """With beta1 a half, eps a half and nothing else, a weight of zero becomes the number itself, but for its sign."""
    blocks = every_code()
    elements = blocks.codes.numel()
    expected = decode(blocks, signed=True)
    weight = torch.zeros(elements)
    segment = Segment(
        weight=weight,
        grad=torch.zeros(elements),
        exp_avg=Blocks(codes=blocks.codes.clone(), exponents=blocks.exponents.clone()),
        exp_avg_sq=blank(elements),
        lr=0.5,
        beta1=0.5,
        beta2=0.5,
        eps=0.5,
        weight_decay=0.0,
        step=1,
    )
    native.adamw([segment], threads=1)
    assert torch.equal(weight, -expected)


def test_the_kernel_reads_every_code_of_a_second_moment_as_the_same_number():
    """A first moment of one, divided by the root of the second: no two numbers next to one another give the same."""
    blocks = every_code()
    elements = blocks.codes.numel()
    v = decode(blocks, signed=False)
    weight = torch.zeros(elements)
    segment = Segment(
        weight=weight,
        grad=torch.zeros(elements),
        exp_avg=encoded(torch.full((elements,), 2.0), signed=True, step=None),
        exp_avg_sq=Blocks(codes=blocks.codes.clone(), exponents=blocks.exponents.clone()),
        lr=0.5,
        beta1=0.5,
        beta2=0.5,
        eps=0.0,
        weight_decay=0.0,
        step=1,
    )
    native.adamw([segment], threads=1)
    root = np.sqrt(F(0.5) * v.numpy()) * F(1 / 0.5**0.5)
    with np.errstate(divide="ignore"):
        expected = torch.from_numpy(-(F(1.0) / root))
    assert torch.equal(weight, expected)
    there = v > 0
    assert len(expected[there].unique()) == len(v[there].unique()), "or the test could not tell them apart"


@SIGNED
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_codes_are_those_of_the_format(kind, elements, signed):
    moment = FIRST if signed else SECOND
    values = GRADIENTS[kind](elements)
    values = values if signed else values.abs()
    for step in (1, 12345, None):
        codes, exponents = moment.encode(values.numpy(), step or 0, dither=step is not None)
        expected = Blocks(codes=torch.from_numpy(codes), exponents=torch.from_numpy(exponents))
        assert_same_codes(encoded(values, signed=signed, step=step), expected, f"step {step}")


# ---- what is lost, and what is not ----


@SIGNED
def test_what_was_decoded_is_encoded_again_without_loss_whatever_the_dither(signed):
    """Of blocks that no encoding would have written, too: every code under every exponent."""
    values = decode(every_code(), signed=signed)
    for step in (None, 1, 2, 3, 77, 1_000_003):
        again = encoded(values, signed=signed, step=step)
        assert torch.equal(decode(again, signed=signed), values), step


@SIGNED
@pytest.mark.parametrize("kind", [kind for kind in GRADIENTS if kind != "not finite"])
def test_a_moment_survives_a_state_dictionary(kind, signed):
    values = GRADIENTS[kind](5000)
    values = values if signed else values.abs()
    for step in range(1, 6):
        one = encoded(values, signed=signed, step=step)
        numbers = decode(one, signed=signed)
        again = encoded(numbers, signed=signed, step=None)
        assert torch.equal(bits(decode(again, signed=signed)), bits(numbers))
        # A block whose largest number was rounded down to the next power of two may be kept under a smaller exponent:
        # other codes for the same numbers. All others are the same bytes.
        moved = again.exponents != one.exponents
        assert (again.exponents[moved] == one.exponents[moved] - 1).all()
        stayed = ~moved.repeat_interleave(BLOCK)[: len(values)]
        assert torch.equal(again.codes[stayed], one.codes[stayed])
        thrice = encoded(numbers, signed=signed, step=step)
        assert_same_codes(thrice, again)


@SIGNED
def test_a_code_is_off_by_less_than_its_last_bit_and_by_half_of_it_without_dither(signed):
    values = spread(64_000, -3.5, 0, seed=3)
    values = values if signed else values.abs()
    exact = values.double().abs()
    last_bit = last_bits(values, signed=signed)
    for step, most in ((None, 0.5), (1, 1.0), (2, 1.0), (31, 1.0)):
        got = decode(encoded(values, signed=signed, step=step), signed=signed)
        assert torch.equal(got.sign()[exact > last_bit], values.sign()[exact > last_bit])
        assert (got * values >= 0).all()
        off = (got.double().abs() - exact).abs() / last_bit
        assert off.max() <= most, (step, off.max())
        assert off.max() > 0.9 * most, "the bound is met: with a wider one the test would see less"


def test_what_is_small_beside_its_block_becomes_zero_in_a_first_moment_and_never_in_a_second():
    """A first moment not at each step: as often as gives its mean."""
    values = torch.full((BLOCK,), 2.0**-13)
    values[0] = 1.0
    values[-1] = 0.0
    smallest = {True: 2.0**-10, False: 2.0**-18}
    total, steps = torch.zeros(BLOCK, dtype=torch.float64), 1000
    for step in range(steps):
        first = decode(encoded(values, signed=True, step=step), signed=True)
        assert first[0] == 1.0
        assert first[-1] == 0.0
        assert ((first[1:-1] == 0.0) | (first[1:-1] == smallest[True])).all()
        total += first
    torch.testing.assert_close(total / steps, values.double(), rtol=0.05, atol=0.0)
    assert not decode(encoded(values, signed=True, step=None), signed=True)[1:].any()
    values[1:-1] = 2.0**-25
    for step in (None, 1, 2, 3):
        second = decode(encoded(values, signed=False, step=step), signed=False)
        assert torch.equal(second, torch.tensor([1.0] + [smallest[False]] * (BLOCK - 2) + [0.0]))


@SIGNED
def test_over_the_steps_rounding_favours_no_side(signed):
    values = spread(640, -3, 0, seed=5)
    values = values if signed else values.abs()
    steps = 2000
    total = torch.zeros(640, dtype=torch.float64)
    for step in range(1, steps + 1):
        total += decode(encoded(values, signed=signed, step=step), signed=signed)
    last_bit = last_bits(values, signed=signed)
    # Independent random numbers would be off by 0.5 / sqrt(2000), a hundredth, and three times that at the worst of
    # 640. Rounding to nearest is off by a fourth on average.
    assert ((total / steps - values.double()) / last_bit).abs().max() < 0.004


@SIGNED
def test_over_the_elements_rounding_favours_no_side(signed):
    for number in (0.3, 0.51, 0.77):
        values = torch.full((6400,), number)
        mean = decode(encoded(values, signed=signed, step=9), signed=signed).double().mean()
        assert abs(mean - number) < 0.004 * 2.0 ** (np.floor(np.log2(number)) - 4), number


def test_a_moment_follows_changes_far_below_one_code():
    """A second moment moves by a thousandth a step, and its codes are a sixteenth apart."""
    target, beta2 = spread(BLOCK, -2, 0, seed=8).abs(), 0.999
    blocks, exact = encoded(target * 4, signed=False, step=None), target.double() * 4
    for step in range(1, 3001):
        v = beta2 * decode(blocks, signed=False) + (1 - beta2) * target
        exact = beta2 * exact + (1 - beta2) * target.double()
        encode(v, blocks, signed=False, step=step)
    torch.testing.assert_close(decode(blocks, signed=False).double(), exact, rtol=0.08, atol=0.0)
    assert (exact < 1.2 * target).all(), "it has moved by many codes"


# ---- parts, sizes and memory ----


@SIGNED
@pytest.mark.parametrize("step", [None, 1, 4711])
def test_parts_with_the_number_of_their_first_element_are_the_whole(step, signed):
    values = with_zeros(spread(1000, -9, 2))
    values = values if signed else values.abs()
    whole, parts = encoded(values, signed=signed, step=step), blank(1000)
    for begin, end in ((0, 128), (128, 192), (192, 960), (960, 1000)):
        blocks = Blocks(codes=parts.codes[begin:end], exponents=parts.exponents[begin // BLOCK : -(-end // BLOCK)])
        encode(values[begin:end], blocks, signed=signed, step=step, first=begin)
    assert_same_codes(parts, whole)
    if step is not None:
        wrong = blank(64)
        encode(values[128:192], wrong, signed=signed, step=step)
        assert not torch.equal(wrong.codes, whole.codes[128:192]), "the number of the first element matters"


@SIGNED
def test_elements_beyond_the_reach_of_32_bits_have_their_own_dither(signed):
    values, blocks = torch.full((BLOCK,), 0.3), blank(BLOCK)
    first = 2**33 + 64 * 7
    encode(values, blocks, signed=signed, step=3, first=first)
    same = blank(BLOCK)
    encode(values, same, signed=signed, step=3, first=64 * 7)  # the kernel counts elements in 32 bits
    assert_same_codes(blocks, same)


@SIGNED
def test_nothing_has_no_codes_and_zeros_have_codes_of_zeros(signed):
    nothing = encoded(torch.zeros(0), signed=signed, step=1)
    assert nothing.codes.numel() == nothing.exponents.numel() == 0
    assert decode(nothing, signed=signed).shape == (0,)
    for elements in SIZES:
        for step in (None, 5):
            assert not encoded(torch.zeros(elements), signed=signed, step=step).codes.any()
        assert torch.equal(bits(decode(blank(elements), signed=signed)), torch.zeros(elements, dtype=torch.int32))


def test_a_block_has_one_exponent():
    assert [exponents_of(n) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


@SIGNED
def test_encoding_writes_its_own_bytes_alone(signed):
    buffer = torch.full((1000,), 77, dtype=torch.uint8)
    blocks = Blocks(codes=buffer[100:165], exponents=buffer[500:502])
    values = spread(65, -3, 0)
    kept = values.clone()
    encode(values, blocks, signed=signed, step=2)
    assert torch.equal(values, kept)
    outside = torch.ones(1000, dtype=torch.bool)
    outside[100:165] = outside[500:502] = False
    assert (buffer[outside] == 77).all()
    assert not (buffer[~outside] == 77).all()
