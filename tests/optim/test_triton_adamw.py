"""The Triton kernel: the host kernel's numbers, in Triton's interpreter.

The interpreter carries the kernel out in numpy, whose fp32 arithmetic is rounded as IEEE 754 says. A GPU's is so too if
the code has no other operations: test_triton_compiled.py looks for those.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stronghold.native import BLOCK, Blocks
from tests.crossed import crossed
from tests.optim.test_adamw_on_device import (
    CASES,
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    assert_same_bits,
    blank,
    copy_of,
    master,
    on_host,
    run,
    segment,
    tensors,
)

pytest.importorskip("triton", reason="needs triton: pip install triton")

import triton.language as tl
from triton.runtime import interpreter

from stronghold.optim import triton_adamw
from stronghold.optim.triton_adamw_kernel import number_of
from tests.optim.interpreted import PROGRAM, filled

# ---- fp32 moments ----


@CASES
def test_every_bit_is_the_hosts(case, update, large):
    mine, theirs = (filled(segment((16_001,), **case)) for _ in range(2))
    run(mine, update, 10, "fp32")
    run(theirs, on_host, 10, "fp32")
    assert_same_bits(mine, theirs)


@WEIGHTS
@GRADIENTS
def test_every_bit_of_each_format_is_the_hosts(weight, grad, update, large):
    mine, theirs = (filled(segment((8_009,), weight, grad, grad_scale=0.37)) for _ in range(2))
    run(mine, update, 10, grad)
    run(theirs, on_host, 10, grad)
    assert_same_bits(mine, theirs)


@WEIGHTS
def test_many_steps_follow_torch_optim_adamw_in_float64(weight, update):
    """With a warm-up, decay, and gradients that have a mean, so that the weights go somewhere."""
    shape, steps = (37, 13), 40
    mine = segment(shape, weight)
    parameter = torch.nn.Parameter(master(mine).double())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, foreach=False)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, steps + 1):
        grad = torch.randn(shape, generator=generator) * 0.1 + 0.02
        lr = 1e-2 * min(1, step / 20)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = grad.double()
        optimizer.step()
        update(replace(mine, grad=grad, step=step, lr=lr))
    state = optimizer.state[parameter]
    # Each step rounds each number, by half a unit in the last place: of weights, up to 4; moments twice.
    torch.testing.assert_close(master(mine).double(), parameter.detach(), rtol=0.0, atol=steps * 2**-23)
    torch.testing.assert_close(mine.exp_avg.double(), state["exp_avg"], rtol=0.0, atol=steps * 2**-27)
    torch.testing.assert_close(mine.exp_avg_sq.double(), state["exp_avg_sq"], rtol=steps * 2**-24, atol=0.0)


# ---- 8-bit moments ----


@CASES
def test_with_eight_bit_moments_every_bit_is_the_hosts(case, update, large):
    mine, theirs = (segment((16_007,), states="8bit", **case) for _ in range(2))
    run(mine, update, 10, "fp32")
    run(theirs, on_host, 10, "fp32")
    assert_same_bits(mine, theirs)


@WEIGHTS
@GRADIENTS
def test_with_eight_bit_moments_every_bit_of_each_format_is_the_hosts(weight, grad, update, large):
    mine, theirs = (segment((8_007,), weight, grad, "8bit", grad_scale=0.37) for _ in range(2))
    run(mine, update, 6, grad)
    run(theirs, on_host, 6, grad)
    assert_same_bits(mine, theirs)


@WEIGHTS
def test_parts_are_dithered_as_the_whole(weight, update):
    whole, parts = (segment((1000,), weight, states="8bit") for _ in range(2))
    run(whole, update, 3, "fp32")
    for begin, end in ((0, 64), (64, 320), (320, 960), (960, 1000)):
        run(parts, lambda s, b=begin, e=end: update(s.part(b, e)), 3, "fp32")
    assert_same_bits(parts, whole)


@pytest.mark.parametrize("first", [2**26, 2**31 - 64, 2**32 + 128, 2**40])
@pytest.mark.parametrize("step", [1, 2**31 - 1, 2**31, 2**33 + 5])
def test_far_elements_and_late_steps_have_the_hosts_dither(first, step, update):
    mine, theirs = (segment((130,), states="8bit", step=step, first=first) for _ in range(2))
    update(mine)
    on_host(theirs)
    assert_same_bits(mine, theirs)


# ---- lengths, shapes, memory ----


@MOMENTS
@WEIGHTS
@pytest.mark.parametrize("n", [1, 31, 63, 64, 65, PROGRAM - 1, PROGRAM, PROGRAM + 1, 3 * PROGRAM + 5])
def test_lengths(n, weight, states, update):
    """Each tensor is the beginning of a larger one, of which nothing else changes."""
    whole = filled(segment((n + 200,), weight, "bf16", states, step=2))
    mine, untouched = whole.part(0, n), copy_of(whole)
    theirs = copy_of(mine)
    update(mine)
    on_host(theirs)
    assert_same_bits(mine, theirs)
    blocks = -(-n // BLOCK)
    for (name, now), before in zip(tensors(whole).items(), tensors(untouched).values(), strict=True):
        end = blocks if "exponents" in name else n
        assert torch.equal(now[end:], before[end:]), name
    assert torch.equal(whole.grad, untouched.grad)


@MOMENTS
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 13), (2, 3, 4, 5)], ids=str)
def test_shapes(shape, states, update):
    mine, theirs = (segment(shape, states=states) for _ in range(2))
    run(mine, update, 2, "fp32")
    run(theirs, on_host, 2, "fp32")
    assert mine.weight.shape == shape
    assert_same_bits(mine, theirs)


def test_more_than_two_to_the_31st_elements(tmp_path, update, monkeypatch):
    """One program far behind, in files of which only the pages that it touches exist."""
    program = 2**31 // PROGRAM + 3
    n, begin = (program + 1) * PROGRAM - 7, program * PROGRAM

    def sparse(name: str, dtype: torch.dtype, count: int = n) -> torch.Tensor:
        return torch.from_file(str(tmp_path / name), shared=True, size=count, dtype=dtype)

    moments = [
        Blocks(codes=sparse(f"codes{i}", torch.uint8), exponents=sparse(f"exponents{i}", torch.uint8, -(-n // BLOCK)))
        for i in range(2)
    ]
    whole = replace(
        segment((1,), "bf16 and remainder", "bf16", step=9),
        weight=sparse("weight", torch.bfloat16),
        remainder=sparse("remainder", torch.int16),
        grad=sparse("grad", torch.bfloat16),
        exp_avg=moments[0],
        exp_avg_sq=moments[1],
    )
    far_behind = whole.part(begin, n)
    start = segment((n - begin,), "bf16 and remainder", "bf16", "8bit", step=9)
    for name in ("weight", "remainder", "grad"):
        getattr(far_behind, name).copy_(getattr(start, name))
    theirs = replace(start, first=begin)
    on_host(theirs)

    # The interpreter would go through two million programs.
    program_id = interpreter.TensorHandle(np.array([program], dtype=np.int32), tl.int32)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: program_id)
    monkeypatch.setattr(triton_adamw, "_programs", lambda elements: 1)
    update(whole)
    assert_same_bits(far_behind, theirs)
    assert not whole.weight[:PROGRAM].any()


# ---- several in one launch ----


@pytest.fixture
def launches(monkeypatch, update, large):
    """Returns how many segments each launch had, as they come."""
    counts, kernel = [], triton_adamw.adamw_of_segments

    class Counting:
        def __getitem__(self, grid):
            def launched(*args, **kwargs):
                weights, ends, *_ = args
                counts.append(sum(end > begin for begin, end in zip(weights, ends, strict=True)))
                return kernel[grid](*args, **kwargs)

            return launched

    monkeypatch.setattr(triton_adamw, "adamw_of_segments", Counting())
    return counts


LENGTHS = [16_384 * 2 + 64, 48, 0, 16_384, 16_384 + 16, 1, 16_385, 63]
"""Of one program and more, some with a ragged end, one with nothing: a program updates 256 blocks of 64."""


@pytest.mark.parametrize(
    ("grad", "weight", "states"), crossed(*(kind.args[1] for kind in (GRADIENTS, WEIGHTS, MOMENTS)), together=1)
)
def test_segments_together_are_each_the_hosts(grad, weight, states, launches):
    mine, theirs = ([filled(segment((n,), weight, grad, states)) for n in LENGTHS] for _ in range(2))
    for step in range(1, 4):
        launches.clear()
        triton_adamw.launch_all([replace(s, step=step) for s in mine])
        assert sorted(launches) == [3, 4]  # those with a ragged end apart
        for s in theirs:
            on_host(replace(s, step=step))
    for one, other in zip(mine, theirs, strict=True):
        assert_same_bits(one, other)


def test_settings_and_formats_that_differ_are_launched_apart(launches):
    def given():
        return [
            filled(segment((128,), weight, grad, states, weight_decay=decay))
            for states in ("fp32", "8bit")
            for weight, grad in (("fp32", "fp32"), ("bf16 and remainder", "bf16"))
            for decay in (0.0, 0.1)
            for _ in range(2)
        ]

    mine, theirs = given(), given()
    triton_adamw.launch_all(mine)
    assert launches == [2] * 8
    for one, other in zip(mine, theirs, strict=True):
        on_host(other)
        assert_same_bits(one, other)


@pytest.mark.parametrize("address", [16, 2**30, 2**31, 2**32 - 16, 2**47])
def test_an_address_is_a_number_of_64_bits_that_16_does_not_divide(address):
    """A program's first memory lies below 2**31, where a number of 32 bits would do, and another kernel be compiled."""
    number = number_of(address)
    assert number % 2 == 1 and 2**62 < number < 2**63
    assert number - number_of(0) == 2 * address


def test_more_segments_than_a_launch_takes(launches):
    mine, theirs = ([segment((64 + 16 * n,), states="8bit") for n in range(37)] for _ in range(2))
    triton_adamw.launch_all(mine)
    assert launches == [16, 16, 5]
    for one, other in zip(mine, theirs, strict=True):
        on_host(other)
        assert_same_bits(one, other)


@MOMENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_segment_stays_whose_squares_are_not_finite(dtype, states, launches):
    mine, before = ([segment((n,), states=states) for n in (16_400, 32, 48, 64, 128)] for _ in range(2))
    squares = torch.tensor([1.0, float("nan"), 2.0, float("inf"), 0.0], dtype=dtype)
    triton_adamw.launch_all(mine, list(squares.unbind()))
    assert launches == [5]
    for n, (one, other) in enumerate(zip(mine, before, strict=True)):
        if n not in (1, 3):
            on_host(other)
        assert_same_bits(one, other)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(128)[::2]}, r"weight must be 64 contiguous elements .* strides \(2,\)"),
        ({"weight": torch.zeros(64, dtype=torch.bfloat16)}, "weight must be 64 contiguous elements of torch.float32 "),
        ({"remainder": torch.zeros(64, dtype=torch.int16)}, "weight must be 64 .* torch.bfloat16 .* torch.float32"),
        ({"grad": torch.zeros(63)}, r"grad must be 64 .* \(got shape \(63,\)"),
        ({"grad": torch.zeros(64, dtype=torch.float16)}, "grad must be .* of torch.float32 or torch.bfloat16 on cpu"),
        ({"grad_remainder": torch.zeros(64, dtype=torch.int16)}, "grad must be 64 contiguous elements of torch.bfl"),
        ({"grad": torch.zeros(64, device="meta")}, "grad must be .* on cpu .* meta"),
        ({"exp_avg": torch.zeros(64, dtype=torch.float64)}, "exp_avg must be .* of torch.float32"),
        ({"exp_avg": blank(64)}, "must be of one kind"),
        ({"exp_avg": blank(64), "exp_avg_sq": blank(65)}, "exp_avg_sq.codes must be 64"),
        (
            {"exp_avg": blank(64), "exp_avg_sq": replace(blank(64), exponents=torch.zeros(2, dtype=torch.uint8))},
            "exp_avg_sq.exponents must be 1 ",
        ),
        ({"exp_avg": blank(64), "exp_avg_sq": blank(64), "first": 32}, "first must be a multiple of 64"),
        ({"step": 0}, "step counts from 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_launched(change, message):
    with pytest.raises(ValueError, match=message):
        triton_adamw.launch(replace(segment((64,)), **change))


def test_squares_are_one_number():
    with pytest.raises(ValueError, match="squares must be 1 contiguous elements of "):
        triton_adamw.launch(segment((64,)), squares=torch.zeros(2))
