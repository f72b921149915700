"""Segments for the tests of the kernels, in every format, and how two of them are compared."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stronghold import native
from stronghold.native import Blocks, Segment
from tests.native_reference import nearest_bf16

ISAS = native.available_isas()
CHUNK = 64 * 1024  # csrc/chunks.h cuts here
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
GRADS = ("float32", "bfloat16", "split")


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 numbers, none of them NaN, as a bfloat16 tensor and the low half of their bits."""
    high = torch.from_numpy(nearest_bf16(values.numpy())).to(torch.bfloat16)
    return high, values.view(torch.int32).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Returns the float32 numbers ``low`` steps beyond ``high``: away from zero where it is positive."""
    steps = high.float().view(torch.int32).long() + low
    return torch.where(steps >= 2**31, steps - 2**32, steps).to(torch.int32).view(torch.float32)


def spread(n: int, scale: float, generator: torch.Generator) -> Tensor:
    """Returns values of many magnitudes with zeros among them."""
    values = torch.randn(n, generator=generator) * scale
    values *= 10 ** (torch.rand(n, generator=generator) * 8 - 6)
    values[torch.rand(n, generator=generator) < 0.02] = 0.0
    return values


def segment(
    n: int,
    *,
    seed: int = 0,
    grad: str = "float32",
    split_weight: bool = False,
    blocks: bool = False,
    step: int = 3,
    **settings,
) -> Segment:
    """Returns a segment of a run under way. The values do not depend on the format of weight and gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = spread(n, 1.0, generator), spread(n, 0.1, generator)
    exp_avg, exp_avg_sq = spread(n, 0.05, generator), spread(n, 0.01, generator).square()
    halves = split(weight) if split_weight else (weight, None)
    grads = {"float32": (gradient, None), "bfloat16": (gradient.bfloat16(), None), "split": split(gradient)}[grad]
    moments = [random_blocks(n, generator) for _ in range(2)] if blocks else [exp_avg, exp_avg_sq]
    return Segment(
        weight=halves[0],
        remainder=halves[1],
        grad=grads[0],
        grad_remainder=grads[1],
        exp_avg=moments[0],
        exp_avg_sq=moments[1],
        step=step,
        **SETTINGS | settings,
    )


def random_blocks(n: int, generator: torch.Generator) -> Blocks:
    count = -(-n // native.BLOCK)
    return Blocks(
        codes=torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator),
        exponents=torch.randint(90, 130, (count,), dtype=torch.uint8, generator=generator),
    )


def buffers(s: Segment) -> dict[str, Tensor]:
    """Returns the tensors of a segment by name; the parts of an 8-bit moment have names of their own."""
    found = {}
    for name in ("weight", "remainder", "grad", "grad_remainder", "exp_avg", "exp_avg_sq"):
        value = getattr(s, name)
        if isinstance(value, Blocks):
            found[f"{name}.codes"], found[f"{name}.exponents"] = value.codes, value.exponents
        elif value is not None:
            found[name] = value
    return found


def with_buffers(s: Segment, tensors: dict[str, Tensor]) -> Segment:
    """Returns the segment with the tensors that ``buffers`` would name."""
    changed: dict[str, Tensor | Blocks] = {}
    for name, tensor in tensors.items():
        moment, _, part = name.partition(".")
        if part:
            changed[moment] = replace(changed.get(moment, getattr(s, moment)), **{part: tensor})
        else:
            changed[moment] = tensor
    return replace(s, **changed)


def copy_of(s: Segment) -> Segment:
    return with_buffers(s, {name: tensor.clone() for name, tensor in buffers(s).items()})


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(a: Segment, b: Segment) -> None:
    others = buffers(b)
    for name, tensor in buffers(a).items():
        assert torch.equal(bits(tensor), bits(others[name])), name


def weight_of(s: Segment) -> Tensor:
    """Returns the float32 weight."""
    return s.weight if s.remainder is None else joined(s.weight, s.remainder)


def all_patterns() -> Tensor:
    """Returns float32 numbers with every upper half, and lower halves around zero, a tie and the next number."""
    upper = torch.arange(0x10000, dtype=torch.int64) << 16
    patterns = torch.cat([upper + lower for lower in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


def as_numpy(moment: Blocks) -> tuple[np.ndarray, np.ndarray]:
    return moment.codes.numpy().copy(), moment.exponents.numpy().copy()
