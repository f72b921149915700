"""Typed, checked wrappers around the compiled host kernels.

Every tensor is contiguous, on the CPU, and overlaps no other of its call. Neither ``threads`` nor ``isa`` changes a
bit of any result. The interpreter lock is released while a kernel runs, and several Python threads may call at once.
What does not fit is refused with a ValueError before anything is written. ``csrc/formats.h`` defines the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stronghold.layout import BLOCK
from stronghold.native.extension import _C


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """An 8-bit moment of n elements: blocks of :data:`BLOCK` codes, counted from the tensor's start, share an exponent.

    ``codes`` holds n bytes, ``exponents`` one for each block, both uint8. Zeros are the moment of zeros. A first
    moment's codes have a sign, 3 exponent and 4 mantissa bits, a second moment's 4 and 4. Storing rounds up or down
    by a dither of low discrepancy, a function of element and step, so that a moment follows changes far below one
    code. After the shared scales of the OCP Microscaling formats and Dettmers et al., "8-bit optimizers via
    block-wise quantization", ICLR 2022.
    """

    codes: Tensor
    exponents: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One tensor's share of an AdamW step.

    The tensors hold the same number of elements; their shapes may differ. ``weight`` and the moments are changed in
    place. ``weight`` is float32, or bfloat16 together with ``remainder``, int16: weight is then the float32 master
    rounded to nearest, ties away from zero, and remainder its low half, so that no bit is lost. ``grad`` is float32
    or bfloat16; with ``grad_remainder``, int16, the gradient is the float32 number that the pair holds. ``exp_avg``
    and ``exp_avg_sq`` are both float32 or both :class:`Blocks`. ``step`` counts from 1, this step included.
    ``grad_scale`` multiplies the gradient. ``first`` is the number that the first
    element has in the whole tensor, on which an 8-bit moment's dither depends.
    """

    weight: Tensor
    remainder: Tensor | None = None
    grad: Tensor
    grad_remainder: Tensor | None = None
    exp_avg: Tensor | Blocks
    exp_avg_sq: Tensor | Blocks
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    first: int = 0

    @property
    def elements(self) -> int:
        return self.weight.numel()

    def part(self, begin: int, end: int) -> Segment:
        """Returns the elements from ``begin`` to ``end``; with 8-bit moments ``begin`` is a multiple of BLOCK."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor.view(-1)[begin:end]

        return self.mapped(cut, lambda exponents: exponents[begin // BLOCK : -(-end // BLOCK)], first=begin)

    def mapped(
        self, of: Callable[[Tensor], Tensor], of_exponents: Callable[[Tensor], Tensor] | None = None, *, first: int = 0
    ) -> Segment:
        """Returns the segment with ``of`` applied to its tensors, to a moment's exponents ``of_exponents``."""

        def moment(given: Tensor | Blocks) -> Tensor | Blocks:
            if isinstance(given, Tensor):
                return of(given)
            return Blocks(codes=of(given.codes), exponents=(of_exponents or of)(given.exponents))

        return replace(
            self,
            weight=of(self.weight),
            remainder=None if self.remainder is None else of(self.remainder),
            grad=of(self.grad),
            grad_remainder=None if self.grad_remainder is None else of(self.grad_remainder),
            exp_avg=moment(self.exp_avg),
            exp_avg_sq=moment(self.exp_avg_sq),
            first=self.first + first,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """``source`` is to be added to ``target``, element by element.

    ``target`` and ``source`` are float32; or both are bfloat16 and ``remainder``, int16, is the target's low half.
    """

    target: Tensor
    remainder: Tensor | None = None
    source: Tensor


def adamw(segments: Sequence[Segment], *, threads: int, isa: str = "auto") -> None:
    """Carries out one step of ``torch.optim.AdamW`` on every segment, in place.

    The arithmetic is float32; ``csrc/adamw.h`` gives the order of operations, and with float32 moments the bounds of
    its errors: 1.5 ulp of a moment, and of a weight 2 ulp of the larger of itself and 8 times its update. Decoupled
    weight decay after Loshchilov & Hutter, ICLR 2019.
    """
    check_threads(threads)
    isa = resolve(isa)
    _C.adamw([_arguments(segment, f"segment {index}: ") for index, segment in enumerate(segments)], threads, isa)


def squared_norms(tensors: Sequence[Tensor], *, threads: int, isa: str = "auto") -> list[float]:
    """Returns for each tensor, float32 or bfloat16, the sum of squares of its elements, computed in float64.

    It is finite if and only if every element is: NaN and infinities show.
    """
    check_threads(threads)
    isa = resolve(isa)
    spans = []
    for index, tensor in enumerate(tensors):  # of a dozen small ones most of the time goes into looking at them
        if not (tensor.is_cpu and tensor.dtype in _FLOATS and tensor.is_contiguous()):
            address(f"tensor {index}", tensor, _FLOATS, tensor.numel())  # which raises
        spans.append((tensor.data_ptr(), tensor.dtype is torch.bfloat16, tensor.numel()))
    return _C.squared_norms(spans, threads, isa)


def accumulate(additions: Sequence[Addition], *, threads: int, isa: str = "auto") -> list[float]:
    """Adds each source to its target in float32; returns for each target the sum of squares of its new values.

    The sums are float64, the same bits as :func:`squared_norms` gives for the new values as float32 tensors.
    """
    check_threads(threads)
    isa = resolve(isa)
    calls = []
    for index, addition in enumerate(additions):
        prefix, n = f"addition {index}: ", addition.target.numel()
        target, remainder = halves(prefix, "target", addition.target, "remainder", addition.remainder, n)
        if addition.target.dtype is torch.bfloat16 and addition.remainder is None:
            raise ValueError(LACKS_REMAINDER.format(f"{prefix}target"))
        source = address(f"{prefix}source", addition.source, (addition.target.dtype,), n)
        calls.append((target, remainder, source, n))
    return _C.accumulate(calls, threads, isa)


def stream(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, threads: int, isa: str = "auto"
) -> None:
    """Reads four float32 tensors and writes all but ``grad``: the memory traffic of an update, without its work.

    Cut and scheduled as :func:`adamw` is, it takes the time that 28 bytes an element need at least. Written values
    stay finite and normal however often it is called, as long as ``grad`` is finite.
    """
    check_threads(threads)
    isa = resolve(isa)
    n = weight.numel()
    _C.stream(
        address("weight", weight, FLOAT32, n),
        address("grad", grad, FLOAT32, n),
        address("exp_avg", exp_avg, FLOAT32, n),
        address("exp_avg_sq", exp_avg_sq, FLOAT32, n),
        n,
        threads,
        isa,
    )


def available_isas() -> tuple[str, ...]:
    """Returns the instruction sets that the kernels can use on this processor, the plainest first."""
    return _AVAILABLE


def best_isa() -> str:
    """Returns what ``isa="auto"`` stands for: the last of :func:`available_isas`."""
    return _BEST


_AVAILABLE = tuple(_C.available_isas())
_BEST = _C.best_isa()


def check_threads(threads: int) -> None:
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads must be an integer of 1 or more (got {threads!r}); pass usable_cores()")


def resolve(isa: str) -> str:
    if isa == "auto":
        return _BEST
    if isa not in _AVAILABLE:
        raise ValueError(
            f"isa must be one that this processor runs (got {isa!r}, it runs {', '.join(_AVAILABLE)}); pass 'auto'"
        )
    return isa


FLOAT32 = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16)
_INT16 = (torch.int16,)
_UINT8 = (torch.uint8,)
LACKS_REMAINDER = "{0} is bfloat16 and needs a remainder, the low half of its float32 master; pass both, or float32"


def _arguments(segment: Segment, prefix: str) -> tuple[object, ...]:
    """Returns what the extension takes for ``segment``. ``prefix`` begins the message if it is refused."""
    weight, grad, exp_avg, exp_avg_sq = segment.weight, segment.grad, segment.exp_avg, segment.exp_avg_sq
    n = weight.numel()
    weight_halves = halves(prefix, "weight", weight, "remainder", segment.remainder, n)
    if weight.dtype is torch.bfloat16 and segment.remainder is None:
        raise ValueError(LACKS_REMAINDER.format(f"{prefix}weight"))
    grad_halves = halves(prefix, "grad", grad, "grad_remainder", segment.grad_remainder, n)
    if isinstance(exp_avg, Blocks) != isinstance(exp_avg_sq, Blocks):
        kinds = [type(moment).__name__ for moment in (exp_avg, exp_avg_sq)]
        raise ValueError(
            f"{prefix}exp_avg and exp_avg_sq must be of one kind (got {kinds[0]} and {kinds[1]}); "
            "pass float32 tensors for both, or Blocks for both"
        )
    moments = (*_moment(f"{prefix}exp_avg", exp_avg, n), *_moment(f"{prefix}exp_avg_sq", exp_avg_sq, n))
    if isinstance(exp_avg, Blocks) and segment.first % BLOCK:
        raise ValueError(f"{prefix}first must be a multiple of {BLOCK} (got {segment.first}); cut between blocks")
    if segment.step < 1:
        raise ValueError(f"{prefix}step counts from 1 (got {segment.step}); increase it before the update")
    return (
        *weight_halves,
        *grad_halves,
        grad.dtype is torch.bfloat16,
        *moments,
        n,
        segment.lr,
        segment.beta1,
        segment.beta2,
        segment.eps,
        segment.weight_decay,
        segment.step,
        segment.grad_scale,
        segment.first,
    )


def halves(prefix: str, name: str, tensor: Tensor, low_name: str, low: Tensor | None, elements: int) -> tuple[int, int]:
    """Returns the addresses of a tensor and of its low half, 0 where it has none."""
    high = address(prefix + name, tensor, _FLOATS, elements)
    if low is None:
        return high, 0
    if tensor.dtype is not torch.bfloat16:
        raise ValueError(
            f"{prefix}{low_name} is the low half of a bfloat16 {name} (got a {name} of {tensor.dtype}); leave it out"
        )
    return high, address(prefix + low_name, low, _INT16, elements)


def _moment(name: str, moment: Tensor | Blocks, elements: int) -> tuple[int, int]:
    """Returns the addresses of a moment and of its exponents, 0 where it has none."""
    if isinstance(moment, Tensor):
        return address(name, moment, FLOAT32, elements), 0
    codes = address(f"{name}.codes", moment.codes, _UINT8, elements)
    return codes, address(f"{name}.exponents", moment.exponents, _UINT8, -(-elements // BLOCK))


def address(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], elements: int) -> int:
    """Returns where the tensor's elements are. Raises ValueError for the first rule that it breaks."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU (got {tensor.device}); copy it to the host first")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed} (got {tensor.dtype}); convert it first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous (got shape {tuple(tensor.shape)} with strides {tensor.stride()}); "
            "pass the storage that it views, or a contiguous copy and copy the result back"
        )
    if tensor.numel() != elements:
        raise ValueError(f"{name} must hold {elements} elements (got {tensor.numel()}); pass matching tensors")
    return tensor.data_ptr()
