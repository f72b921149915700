"""The Triton kernel: the host kernel's numbers, in Triton's interpreter, in what the compiler makes of it, on a GPU.

The interpreter carries the kernel out in numpy, whose fp32 arithmetic is rounded as IEEE 754 says. A GPU's is so too if
the code has no other operations: the tests of the compiled code look for those.
"""

import ctypes
import ctypes.util
import math
import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from stronghold.native import BLOCK, Blocks, Segment
from stronghold.split import join
from tests.optim.test_adamw_on_device import (
    CASES,
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    assert_same_bits,
    blank,
    copy_of,
    gradient,
    master,
    on,
    on_host,
    run,
    segment,
    spread,
    tensors,
)

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

import triton.language as tl  # noqa: E402
from triton.backends import backends  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from stronghold.optim import triton_adamw, triton_formats, triton_rounding  # noqa: E402

PROGRAM = triton_adamw.ROWS * BLOCK


@pytest.fixture
def update(monkeypatch):
    """Returns the launch, of a kernel that Triton's interpreter carries out on the CPU."""
    for module in (triton_formats, triton_rounding, triton_adamw):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
    monkeypatch.setattr(triton_rounding, "IN_PTX", False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", interpreted_fma)
    language = kept(tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    # What lies beyond a segment's end is 0 / eps, and eps may be 0.
    with language, monkeypatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(tl, "max", greatest)  # Triton's own is a kernel too, which would be compiled
        yield triton_adamw.launch


@contextmanager
def kept(*places):
    """Puts the names of modules and classes back as they were: the interpreter of Triton 3.5 leaves its own there."""
    before = [dict(vars(place)) for place in places]
    yield
    for place, names in zip(places, before, strict=True):
        for name, value in [*vars(place).items()]:
            if name not in names:
                delattr(place, name)
            elif value is not names[name]:
                setattr(place, name, names[name])


def interpreted_fma(self, x, y, z):
    return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)


def fma(x, y, z):
    """Returns x * y + z of fp32 numbers, rounded once: Triton's interpreter before 3.9 rounds twice.

    Float64 has room for the product. The rounded sum is made odd where it is not exact, so that it is rounded to fp32
    the way the exact one would be: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers, 2008.
    """
    product, z = np.broadcast_arrays(np.multiply(x, y, dtype=np.float64), np.asarray(z, dtype=np.float64))
    total = product + z
    of_z = total - product
    low = (product - (total - of_z)) + (z - of_z)
    towards = np.nextafter(total, np.copysign(np.inf, low))
    even = total.view(np.int64) % 2 == 0
    return np.where(np.isfinite(low) & (low != 0) & even, towards, total).astype(np.float32)


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


def greatest(x, axis, keep_dims):
    data = x.handle.data.max(axis, keepdims=keep_dims)
    return tl.tensor(interpreter.TensorHandle(data, x.dtype), tl.block_type(x.dtype, list(data.shape)))


@pytest.fixture
def large(monkeypatch):
    """Has a program update many elements: an interpreted operation takes as long for few of them."""
    monkeypatch.setattr(triton_adamw, "ROWS", 256)


def filled(s: Segment) -> Segment:
    """Returns a segment whose fp32 moments are those of some steps."""
    generator = torch.Generator().manual_seed(5)
    if isinstance(s.exp_avg, torch.Tensor):
        s.exp_avg.copy_(spread(s.exp_avg.shape, 0.05, generator))
        s.exp_avg_sq.copy_(spread(s.exp_avg.shape, 0.01, generator).square())
    return s


def far(got: torch.Tensor, expected: torch.Tensor, *operands: np.ndarray) -> float:
    """Returns the greatest distance in units of the last place of ``expected`` or of a larger operand."""
    exact = expected.double().numpy()
    larger = np.max([np.abs(operand) for operand in (exact, *operands)], axis=0).astype(np.float32)
    return float((np.abs(got.double().numpy() - exact) / np.spacing(larger).astype(np.float64)).max())


def exact(s: Segment) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the new fp32 moments, and the decayed weight and what is subtracted from it, all in float64."""
    values = s.grad.float() if s.grad_remainder is None else join(s.grad, s.grad_remainder)
    g = values.double().numpy() * s.grad_scale
    m = s.beta1 * s.exp_avg.double().numpy() + (1 - s.beta1) * g
    v = s.beta2 * s.exp_avg_sq.double().numpy() + (1 - s.beta2) * g * g
    denominator = np.sqrt(v) / math.sqrt(1 - s.beta2**s.step) + s.eps
    kept = master(s).double().numpy() * (1 - s.lr * s.weight_decay)
    return m, v, kept, s.lr / (1 - s.beta1**s.step) * m / denominator


def assert_the_hosts(got: Segment, expected: Segment, kept: np.ndarray, moved: np.ndarray, ties: float = 0.01) -> None:
    """Asserts that a step with fp32 moments gave the host's bits, and their neighbours in few elements.

    Where beta1 is 0.9, a tenth of the decayed moments are ties but for the error of 0.9 in float64: so are some sums.
    """
    pairs = [
        (got.exp_avg, expected.exp_avg, ()),
        (got.exp_avg_sq, expected.exp_avg_sq, ()),
        (master(got), master(expected), (kept, moved)),
    ]
    for one, other, larger in pairs:
        assert far(one, other, *larger) <= 1
        assert (one != other).double().mean() <= ties


# ---- fp32 moments ----


@CASES
def test_a_step_is_the_hosts_but_for_ties(case, update, large):
    before = filled(segment((100_003,), step=7, **case))
    mine, theirs = copy_of(before), copy_of(before)
    update(mine)
    on_host(theirs)
    m, v, kept, moved = exact(before)
    assert_the_hosts(mine, theirs, kept, moved)
    assert (mine.weight != theirs.weight).sum() <= 2
    half = 0.5 + 2**-20
    assert far(mine.exp_avg, torch.from_numpy(m)) <= half
    assert far(mine.exp_avg_sq, torch.from_numpy(v)) <= half
    assert far(mine.weight, torch.from_numpy(kept - moved), kept, moved) <= half


@WEIGHTS
@GRADIENTS
def test_a_step_of_each_format_is_the_hosts_but_for_ties(weight, grad, update, large):
    before = filled(segment((16_001,), weight, grad, step=3, grad_scale=0.37))
    mine, theirs = copy_of(before), copy_of(before)
    update(mine)
    on_host(theirs)
    assert_the_hosts(mine, theirs, *exact(before)[2:])


@WEIGHTS
@GRADIENTS
def test_many_steps_stay_with_the_hosts(weight, grad, update, large):
    steps = 30
    mine, theirs = (segment((8_009,), weight, grad) for _ in range(2))
    run(mine, update, steps, grad)
    run(theirs, on_host, steps, grad)
    torch.testing.assert_close(master(mine), master(theirs), rtol=2e-7, atol=1e-2 * 1e-7 * steps)
    torch.testing.assert_close(mine.exp_avg, theirs.exp_avg, rtol=3e-7, atol=1e-8)
    torch.testing.assert_close(mine.exp_avg_sq, theirs.exp_avg_sq, rtol=2e-7, atol=0.0)
    assert (master(mine) == master(theirs)).double().mean() > 0.95


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
    # Each step rounds each number once, by half a unit in the last place: of weights, up to 4.
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
    if states == "8bit":
        assert_same_bits(mine, theirs)
    else:
        assert_the_hosts(mine, theirs, *exact(untouched.part(0, n))[2:], ties=1.0)
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
    if states == "8bit":
        assert_same_bits(mine, theirs)
    elif mine.weight.numel():
        assert far(mine.weight, theirs.weight, np.full(shape, 1e-2)) <= 1


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

    # The interpreter would go through two million programs, and copy what it was given.
    program_id = interpreter.TensorHandle(np.array([program], dtype=np.int32), tl.int32)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: program_id)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    monkeypatch.setattr(triton_adamw.triton, "cdiv", lambda elements, block: 1)
    update(whole)
    assert_same_bits(far_behind, theirs)
    assert not whole.weight[:PROGRAM].any()


# ---- numbers that are not finite, or extreme ----


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
        other = tensors(theirs)[name]
        if states == "8bit":
            assert torch.equal(bits_with_one_nan(one), bits_with_one_nan(other)), name
        elif name != "remainder":
            torch.testing.assert_close(one, other, rtol=2e-7, atol=1e-9, equal_nan=True)
    if mine.remainder is not None:
        assert not mine.remainder[master(mine).isnan()].any()


@WEIGHTS
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e-39, 1e-30, 3e-23, 1e-8, 3e19, 2e38, -2e38, 3.4e38])
def test_with_eight_bit_moments_extreme_gradients_give_the_hosts_bits(value, weight, update):
    mine, theirs = (segment((130,), weight, states="8bit") for _ in range(2))
    for step in (1, 2, 3):
        for one, kernel in ((mine, update), (theirs, on_host)):
            kernel(replace(one, grad=torch.full((130,), value), step=step))
        assert_same_bits(mine, theirs, f"step {step}")


@WEIGHTS
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e-39, 1e-30, 3e-23, 1e-17, 1e-8, 1.0, 3e19, 1e20, -1e20])
def test_with_fp32_moments_extreme_gradients_give_the_hosts_numbers(value, weight, update):
    mine, theirs = (segment((130,), weight) for _ in range(2))
    for step in (1, 2, 3):
        for one, kernel in ((mine, update), (theirs, on_host)):
            kernel(replace(one, grad=torch.full((130,), value), step=step))
    for one, other in ((mine.exp_avg, theirs.exp_avg), (mine.exp_avg_sq, theirs.exp_avg_sq)):
        assert far(one, other) <= 3
    assert far(master(mine), master(theirs), np.full(130, 1e-2)) <= 1


def test_denormal_weights_and_moments_give_the_hosts_numbers(update):
    mine = segment((512,), step=5)
    for tensor, scale in ((mine.weight, 1e-38), (mine.exp_avg, 1e-39), (mine.exp_avg_sq, 1e-39), (mine.grad, 1e-38)):
        tensor.copy_(torch.randn(512, generator=torch.Generator().manual_seed(1)) * scale)
    mine.exp_avg_sq.abs_()
    theirs = copy_of(mine)
    update(mine)
    on_host(theirs)
    for one, other in ((mine.exp_avg, theirs.exp_avg), (mine.exp_avg_sq, theirs.exp_avg_sq)):
        assert far(one, other) <= 2
        assert one.any()
    # The host divides the moment before it rounds it to a multiple of 2 ** -149.
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=3e-7, atol=1e-2 / 0.4 * 2**-148 / 1e-8)
    assert mine.weight.abs().median() > 1e-33


def test_a_second_moment_beyond_fp32_is_infinite_and_its_weight_decays_only(update):
    mine = replace(segment((64,)), grad=torch.full((64,), 3e38))
    theirs, before = copy_of(mine), mine.weight.clone()
    update(mine)
    on_host(theirs)
    assert mine.exp_avg_sq.isinf().all() and theirs.exp_avg_sq.isinf().all()
    assert torch.equal(mine.exp_avg, theirs.exp_avg)
    assert far(mine.weight, (before.double() * (1 - 1e-2 * 0.1)).float()) <= 1


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


# ---- what the compiler makes of it ----


class Recorded:
    """Stands for the kernel and keeps what it is launched with."""

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def bound(s: Segment, monkeypatch, target, squares=None):
    """Returns the backend, and what Triton chooses a compiled kernel by for a segment: its cache's key."""
    kernel, recorded = triton_adamw.adamw_of_segment, Recorded()
    with monkeypatch.context() as patch:
        patch.setattr(triton_adamw, "adamw_of_segment", recorded)
        triton_adamw.launch(s, squares=squares)
    backend = triton.compiler.make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return backend, recorded.kwargs, *binder(*recorded.args, **recorded.kwargs)


needs_nvidia = pytest.mark.skipif("nvidia" not in backends, reason="this triton does not compile for NVIDIA")
needs_jit = pytest.mark.skipif(
    not isinstance(triton_adamw.adamw_of_segment, JITFunction), reason="TRITON_INTERPRET is set: nothing is compiled"
)
HOPPER = triton.backends.compiler.GPUTarget("cuda", 90, 32)


@needs_nvidia
@needs_jit
@MOMENTS
def test_other_scalars_do_not_compile_anew(states, monkeypatch):
    one = segment((4096,), states=states)
    *_, key, options = bound(one, monkeypatch, HOPPER)
    late = 2**30 + 1
    changes = [
        {"step": 2},
        {"step": 16},
        {"step": late},
        {"lr": 0.0},
        {"lr": 1.0},
        {"weight_decay": 0.0},
        {"grad_scale": 0.5},
    ]
    changes += [{"first": 2**33}, {"beta1": 0.0}, {"eps": 1.0}]
    for change in changes:
        *_, other, other_options = bound(replace(one, **change), monkeypatch, HOPPER)
        assert (other, other_options) == (key, options), change
    *_, other, _ = bound(segment((4097,), states=states), monkeypatch, HOPPER)
    assert other != key  # the comparison can fail: a length that is no multiple of 16 is compiled for itself


@needs_nvidia
@needs_jit
@WEIGHTS
@GRADIENTS
@MOMENTS
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_to_operations_that_round_as_ieee_754_says(capability, states, grad, weight, monkeypatch, tmp_path):
    """Products and sums that nothing fuses, correct roots and quotients, denormal numbers; and wide loads."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    squares = torch.zeros((), dtype=torch.float64)
    given = segment((4096,), weight, grad, states)
    backend, kwargs, arguments, key, options = bound(given, monkeypatch, target, squares=squares)
    kernel = triton_adamw.adamw_of_segment
    options, signature, constants, attributes = kernel._pack_args(backend, dict(kwargs), arguments, key, options)
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=target, options=options.__dict__).asm["ptx"]

    assert not options.enable_fp_fusion  # which ptxas is told too
    operations = set(re.findall(r"\b((?:add|sub|mul|fma|div|sqrt|rsqrt|rcp|ex2)\.[\w.]*f(?:32|64))\b", ptx))
    rounded = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "sqrt.rn.f32", "div.rn.f32"}
    if states == "fp32":  # fused where it is written, for what rounding loses; of that an approximate quotient will do
        rounded |= {"fma.rn.f32", "div.full.f32"}
    assert operations == rounded
    elements = triton_adamw.ROWS * BLOCK // (4 * 32)
    assert len(re.findall(r"div\.rn\.f32", ptx)) == len(re.findall(r"sqrt\.rn\.f32", ptx)) == elements
    assert "ftz" not in ptx
    wide = len(re.findall(r"ld\.global\.v[24]\.b32", ptx))
    assert wide >= (3 if states == "8bit" else 6)
    assert not re.search(r"ld\.global\.b(16|32)", ptx)  # four elements at a time, and more


# ---- a GPU ----


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


def launches(work) -> list[str]:
    """Returns the names of the kernels that ``work`` launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@WEIGHTS
@GRADIENTS
@MOMENTS
@pytest.mark.parametrize("n", [1, 64, 16_001, 3 * 2**20 + 16])
def test_on_a_gpu_a_step_is_the_hosts(n, states, grad, weight, gpu):
    before = filled(segment((n,), weight, grad, states, grad_scale=0.37))
    mine, theirs = on(gpu, before), copy_of(before)
    for step in (1, 2, 3) if states == "8bit" else (1,):
        change = gradient((n,), grad, step)
        moved = {name: tensor if tensor is None else tensor.to(gpu) for name, tensor in change.items()}
        triton_adamw.launch(replace(mine, step=step, **moved), squares=torch.ones((), dtype=torch.float64, device=gpu))
        on_host(replace(theirs, step=step, **change))
    got = on("cpu", mine)
    if states == "8bit":
        assert_same_bits(got, theirs)
    else:
        assert_the_hosts(got, theirs, *exact(replace(before, step=1, **gradient((n,), grad, 1)))[2:], ties=0.05)
    triton_adamw.launch(mine, squares=torch.full((), math.nan, dtype=torch.float64, device=gpu))
    assert_same_bits(on("cpu", mine), got)


@pytest.mark.gpu
@MOMENTS
def test_on_a_gpu_a_step_is_one_launch_and_takes_no_memory(states, gpu):
    parameters = [on(gpu, segment((n,), "bf16 and remainder", "bf16", states)) for n in (5_000_000, 4096, 333)]
    for one in parameters:
        triton_adamw.launch(one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = launches(lambda: [triton_adamw.launch(replace(one, step=2, lr=0.5)) for one in parameters])
    assert found == [triton_adamw.adamw_of_segment.__name__] * len(parameters)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_on_a_gpu_more_than_two_to_the_31st_elements(gpu):
    n, begin = 2**31 + 3 * PROGRAM - 7, 2**31 - PROGRAM
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 20 GB of device memory")
    zeros = {name: torch.zeros(n, dtype=torch.bfloat16, device=gpu) for name in ("weight", "grad")}
    moments = [
        Blocks(
            codes=torch.zeros(n, dtype=torch.uint8, device=gpu),
            exponents=torch.zeros(-(-n // BLOCK), dtype=torch.uint8, device=gpu),
        )
        for _ in range(2)
    ]
    whole = replace(
        segment((1,), step=9),
        remainder=torch.zeros(n, dtype=torch.int16, device=gpu),
        exp_avg=moments[0],
        exp_avg_sq=moments[1],
        **zeros,
    )
    start = segment((n - begin,), "bf16 and remainder", "bf16", "8bit", step=9)
    behind = whole.part(begin, n)
    for name in ("weight", "remainder", "grad"):
        getattr(behind, name).copy_(getattr(start, name))
    triton_adamw.launch(whole)
    theirs = replace(start, first=begin)
    on_host(theirs)
    assert_same_bits(on("cpu", behind), theirs)
    assert not whole.weight[:begin].any()


@pytest.mark.gpu
def test_on_a_gpu_it_runs_in_the_current_stream_of_the_tensors_device(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    mine, theirs = on("cuda:1", segment((4096,), states="8bit")), segment((4096,), states="8bit")
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.device(0), torch.cuda.stream(stream):
        triton_adamw.launch(mine)
    stream.synchronize()
    on_host(theirs)
    assert_same_bits(on("cpu", mine), theirs)
