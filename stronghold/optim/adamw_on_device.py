"""AdamW for layers that are resident on a device other than the CPU: a Triton kernel, or torch's own operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim.blocks import LARGEST, decode, encode
from stronghold.split import SPLIT, join, split

PART = 4 * 2**20
"""Elements that torch's operations work on at a time: what bounds the temporary memory. A multiple of a block."""
assert PART % BLOCK == 0

_SCRATCH_BYTES = {
    ("float32", "fp32"): (8, 0),
    ("bfloat16", "fp32"): (12, 9),
    ("float32", "8bit"): (64, 0),
    ("bfloat16", "8bit"): (68, 0),
}
"""What they take beside their arguments, by weights and moments: for each of these elements, and for each of those that
are split at a time, at most, measured and rounded up."""
_SCRATCH_BESIDE_BYTES = 32 * 512
"""PyTorch's allocators round each block up to 512 bytes. There are fewer than 32 at once, numbers of one element among
them."""

DEVICES = ("cuda", "xpu")
"""The types of device that Triton compiles for; "cuda" is AMD's too."""
_compiles: dict[torch.device, bool] = {}


def adamw_on_device(segments: Sequence[Segment], squares: Sequence[Tensor] | None = None, *, part: int = PART) -> None:
    """Carries out one step of ``torch.optim.AdamW`` on tensors of any one device, in place, in fp32.

    ``squares`` are numbers on the device: where that of a segment is not finite, it does not change. Nothing is waited
    for. Where Triton compiles for the device this is one launch for all that have settings and a step in common, takes
    no memory and gives the bits of :func:`stronghold.native.adamw`. Elsewhere torch's operations, in an order of their
    own, work on ``part`` elements at a time and give the same to a few roundings.
    """
    if not segments:
        return
    if _triton_compiles(segments[0].weight.device):
        from stronghold.optim import triton_adamw

        triton_adamw.launch_all(segments, squares)
    else:
        for number, segment in enumerate(segments):
            _by_torch(segment, None if squares is None else squares[number], part)


def scratch_bytes(elements: int, device_type: str, *, dtype: torch.dtype, states: str) -> int:
    """Returns what an update of ``elements`` weights takes on the device at most, beside its arguments.

    On a device that Triton compiles for that is nothing.
    """
    if device_type in DEVICES:
        return 0
    of_each, of_split = _SCRATCH_BYTES[str(dtype).removeprefix("torch."), states]
    return min(elements, PART) * of_each + min(elements, SPLIT) * of_split + _SCRATCH_BESIDE_BYTES


def _triton_compiles(device: torch.device) -> bool:
    """Returns whether Triton compiles for ``device``; tries it at the first call, on a block of zeros.

    Triton needs the machine's C compiler for the code that launches a kernel. Where that or something else is
    missing, a RuntimeWarning says so, once for each device.
    """
    if device.type not in DEVICES:
        return False
    if device not in _compiles:
        _compiles[device] = find_spec("triton") is not None and _try_on(device)
    return _compiles[device]


def _try_on(device: torch.device) -> bool:
    weight, grad, exp_avg, exp_avg_sq = torch.zeros(4, BLOCK, device=device)
    trial = Segment(
        weight=weight,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        step=1,
    )
    try:
        from stronghold.optim import triton_adamw

        triton_adamw.launch_all([trial])
    except Exception as error:
        warnings.warn(
            f"layers that are resident on {device} are updated by many launches for each parameter, where one would "
            f"do: Triton cannot compile its kernel ({type(error).__name__}: {error}); install a C compiler and "
            "Python's headers (on Debian: apt-get install gcc python3-dev), or uninstall triton",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True


def _by_torch(segment: Segment, squares: Tensor | None, part: int) -> None:
    """Updates the segment by torch's own operations, ``part`` elements at a time."""
    skip = None if squares is None else ~torch.isfinite(squares).reshape(())
    elements = segment.weight.numel()
    for begin in range(0, elements, part):
        one = segment.part(begin, min(begin + part, elements))
        grad = join(one.grad, one.grad_remainder) if one.grad_remainder is not None else one.grad.float()
        if segment.grad_scale != 1.0:
            grad = grad * segment.grad_scale
        weight = one.weight if one.remainder is None else join(one.weight, one.remainder)
        if isinstance(one.exp_avg, Blocks):
            assert isinstance(one.exp_avg_sq, Blocks)
            before = weight.clone() if skip is not None else weight
            codes = [t.clone() for b in (one.exp_avg, one.exp_avg_sq) for t in (b.codes, b.exponents)]
            _step_in_blocks(one, weight, grad, one.exp_avg, one.exp_avg_sq)
            if skip is not None:
                weight.copy_(torch.where(skip, before, weight))
                now = [t for b in (one.exp_avg, one.exp_avg_sq) for t in (b.codes, b.exponents)]
                for tensor, kept in zip(now, codes, strict=True):
                    tensor.copy_(torch.where(skip, kept, tensor))
        else:
            assert isinstance(one.exp_avg_sq, Tensor)
            _step(one, weight, grad, one.exp_avg, one.exp_avg_sq, skip)
        if one.remainder is not None:
            split(weight, one.weight, one.remainder)


def _step(s: Segment, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, skip: Tensor | None) -> None:
    """Takes a step with fp32 moments, in place; where ``skip`` is true it adds zeros and multiplies by one.

    ``torch.optim.AdamW(fused=True)`` would be one launch. On CUDA it rounds beta2 to fp32 before it subtracts it from
    1 (torch 2.11): 0.999 then leaves 0.001 less a part in 77,700, and so much too small are all second moments.
    """

    def keeps(factor: float) -> Tensor | float:
        if skip is None:
            return factor
        return torch.full((), factor, dtype=torch.float32, device=skip.device).masked_fill_(skip, 1.0)

    def added(values: Tensor, zero: float) -> Tensor:
        return values if skip is None else values.masked_fill_(skip, zero)

    values = added(grad * (1 - s.beta1), -0.0)  # 0.0 would make a moment of -0.0 another
    exp_avg.mul_(keeps(s.beta1)).add_(values)
    torch.mul(grad, 1 - s.beta2, out=values).mul_(grad)  # the square alone may be beyond fp32
    exp_avg_sq.mul_(keeps(s.beta2)).add_(added(values, 0.0))
    torch.sqrt(exp_avg_sq, out=values).mul_(1 / (1 - s.beta2**s.step) ** 0.5).add_(s.eps)
    torch.div(exp_avg, values, out=values).mul_(s.lr / (1 - s.beta1**s.step))
    weight.mul_(keeps(1 - s.lr * s.weight_decay)).sub_(added(values, 0.0))


def _step_in_blocks(s: Segment, weight: Tensor, grad: Tensor, exp_avg: Blocks, exp_avg_sq: Blocks) -> None:
    """The kernel's own arithmetic, operation by operation."""
    m = s.beta1 * decode(exp_avg, signed=True) + (1 - s.beta1) * grad
    v = s.beta2 * decode(exp_avg_sq, signed=False) + (1 - s.beta2) * (grad * grad)
    v = v.clamp(max=LARGEST)
    denominator = v.sqrt() * (1 / (1 - s.beta2**s.step) ** 0.5) + s.eps
    weight.mul_(1 - s.lr * s.weight_decay).sub_((s.lr / (1 - s.beta1**s.step)) * m / denominator)
    encode(m, exp_avg, signed=True, step=s.step, first=s.first)
    encode(v, exp_avg_sq, signed=False, step=s.step, first=s.first)
