"""The Triton kernel in Triton's interpreter, and how far a step of it may be from the host's."""

import math
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from stronghold.native import BLOCK, Segment
from stronghold.optim import triton_adamw, triton_formats, triton_rounding
from stronghold.split import join
from tests.optim.test_adamw_on_device import master, spread

PROGRAM = triton_adamw.ROWS * BLOCK


@contextmanager
def interpreting(monkeypatch):
    """Has Triton's interpreter carry the kernel out, on the CPU, while the block runs."""
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
        yield


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


def greatest(x, axis, keep_dims):
    data = x.handle.data.max(axis, keepdims=keep_dims)
    return tl.tensor(interpreter.TensorHandle(data, x.dtype), tl.block_type(x.dtype, list(data.shape)))


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
