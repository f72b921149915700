"""The Triton kernel in Triton's interpreter."""

from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from stronghold.native import BLOCK, Segment
from stronghold.optim import triton_adamw, triton_adamw_kernel, triton_formats, triton_rounding
from tests.optim.test_adamw_on_device import spread

PROGRAM = triton_adamw.ROWS * BLOCK


@contextmanager
def interpreting(monkeypatch):
    """Has Triton's interpreter carry the kernel out, on the CPU, while the block runs."""
    for module in (triton_formats, triton_rounding, triton_adamw_kernel, triton_adamw):
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
