"""Muon's arithmetic, in ``torch.optim.Muon``'s order of operations (Jordan et al., 2024), on the host or a device.

A step of one matrix has three parts: :class:`MomentumSegment` and :class:`StepSegment` go element by element, so that
a matrix may pass through memory in pieces, and between them :class:`Direction` takes the matrix as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stronghold import native
from stronghold.device import Event, Wait, Waits
from stronghold.split import join, split

PART = 2**18
"""Elements that are worked on at a time: what bounds the temporary memory, and keeps it in a core's cache."""


def newton_schulz(matrix: Tensor, *, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Returns ``matrix``, contiguous bf16 of two dimensions, made nearly orthogonal; its memory is overwritten.

    The quintic iteration of Newton and Schulz, operation for operation and in the dtype of ``torch.optim.Muon`` (its
    ``_zeropower_via_newtonschulz``): all singular values come near to 1. It needs three numbers in ``coefficients``.
    """
    a, b, c = coefficients
    turned = matrix.size(0) > matrix.size(1)
    result = matrix.T if turned else matrix
    result.div_(result.norm().clamp(min=eps))  # no singular value is above 1
    if not steps:
        return matrix
    gram, change = matrix.new_empty(2, len(result), len(result))
    # What the first step reads the later ones may write, as if it lay the other way.
    free, other = matrix.new_empty(result.shape), matrix.view(result.shape)
    for _ in range(steps):
        torch.mm(result, result.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=change)
        torch.addmm(result, change, result, beta=a, out=free)
        result, free, other = free, other, free
    return free.view(matrix.shape).copy_(result.T) if turned else result


def newton_schulz_bytes(shape: Sequence[int]) -> int:
    """Returns what the iteration takes on the device at most, its argument with it.

    That is two matrices of ``shape``, and two squares of its shorter side, all in bf16.
    """
    short = min(shape)
    return 2 * (2 * math.prod(shape) + 2 * short * short)


def adjusted_lr(lr: float, adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Returns what a matrix of ``shape`` is moved by: ``lr``, adjusted as ``torch.optim.Muon`` does.

    ``"original"``, as None, is Jordan's, and ``"match_rms_adamw"`` that of Liu et al., "Muon is Scalable for LLM
    Training", 2025, whose updates have the size of AdamW's.
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def _has_kernel(values: Tensor, other: Tensor) -> bool:
    """Whether the host's kernels, which compute the same bits, take tensors of this place and dtype."""
    return values.is_cpu and other.dtype in (torch.float32, torch.bfloat16)


class InCommon(Protocol):
    """The directions of one update whose matrices a machine's replicas have in common."""

    def take(self) -> None:
        """Blocks until every replica's share is there and all directions are orthogonal."""


class Direction:
    """The direction in which one matrix moves: what the momentum says, and then that made orthogonal.

    ``values`` is bf16, of the matrix's shape. With ``waits`` it is on the host, and the iteration runs on their device,
    beside the computation; without, where ``values`` are, at once. With ``in_common``, which an update sets, the
    replicas write a share of ``values`` each, and that says who iterates.
    """

    in_common: InCommon | None = None

    def __init__(
        self, values: Tensor, waits: Waits | None = None, *, coefficients: Sequence[float], steps: int, eps: float
    ) -> None:
        self.values = values
        self.waits, self._device = waits, None if waits is None else waits.device
        self._coefficients, self._steps, self._eps = tuple(coefficients), steps, eps
        self._done: Event | None = None

    def begin(self) -> None:
        """Called when all ``values`` are there that this process writes: begins the iteration if those are all."""
        if self.in_common is None:
            self.iterate()

    def take(self) -> None:
        """Blocks until the orthogonal ``values`` are there."""
        if self.in_common is None:
            self.wait_iterated()
        else:
            self.in_common.take()

    def iterate(self) -> None:
        """Begins the iteration, with ``waits`` on their device."""
        if self._device is None:
            self._iterate()
        else:
            self._done = self._device.beside(self._iterate)

    def wait_iterated(self) -> None:
        """Blocks until the iteration that this process has begun is complete."""
        if self.waits is not None:
            # The host moves weights along what comes down from the iteration: the copy must be complete.
            self.waits.host(self._done, Wait.DIRECTION)

    def _iterate(self) -> None:
        values = self.values
        there = values if self._device is None else values.to(self._device.torch_device, non_blocking=True)
        result = newton_schulz(there, coefficients=self._coefficients, steps=self._steps, eps=self._eps)
        values.copy_(result, non_blocking=self._device is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumSegment:
    """Elements of one matrix whose gradient goes into its momentum, and that into its direction.

    ``momentum_buffer`` is float32 and changed in place; the gradient is as :class:`stronghold.native.Segment` has it,
    and multiplied by ``grad_scale``. With ``squares``, a number on the device, nothing changes where that is not
    finite. ``last`` says whether the matrix is complete with these.
    """

    direction: Direction
    values: Tensor
    grad: Tensor
    grad_remainder: Tensor | None
    momentum_buffer: Tensor
    momentum: float
    nesterov: bool
    grad_scale: float = 1.0
    squares: Tensor | None = None
    last: bool = True

    @property
    def elements(self) -> int:
        return self.momentum_buffer.numel()

    def part(self, begin: int, end: int) -> MomentumSegment:
        """Returns the elements from ``begin`` to ``end``."""
        last = self.last and end == self.elements
        return replace(self.mapped(lambda tensor: tensor.view(-1)[begin:end]), last=last)

    def mapped(self, of: Callable[[Tensor], Tensor]) -> MomentumSegment:
        """Returns the segment with ``of`` applied to its tensors."""
        return replace(
            self,
            values=of(self.values),
            grad=of(self.grad),
            grad_remainder=None if self.grad_remainder is None else of(self.grad_remainder),
            momentum_buffer=of(self.momentum_buffer),
        )

    def run(self, threads: int = 1) -> None:
        """Updates the momentum, and begins the matrix's iteration if these are its last elements."""
        if self.squares is None and _has_kernel(self.values, self.grad):
            piece = native.Momentum(
                direction=self.values,
                grad=self.grad,
                grad_remainder=self.grad_remainder,
                momentum_buffer=self.momentum_buffer,
                momentum=self.momentum,
                nesterov=self.nesterov,
                grad_scale=self.grad_scale,
            )
            native.muon_momentum(piece, threads=threads)
        else:
            self.run_in_torch()
        if self.last:
            self.direction.begin()

    def run_in_torch(self) -> None:
        """Does the same by PyTorch's operations, wherever the tensors are."""
        for begin in range(0, self.elements, PART):
            self.part(begin, min(begin + PART, self.elements))._run()

    def _run(self) -> None:
        grad = self.grad.float() if self.grad_remainder is None else join(self.grad, self.grad_remainder)
        if self.grad_scale != 1.0:
            grad = grad * self.grad_scale
        buffer = self.momentum_buffer
        if self.squares is None:
            buffer.lerp_(grad, 1 - self.momentum)
        else:
            buffer.copy_(torch.where(torch.isfinite(self.squares), buffer.lerp(grad, 1 - self.momentum), buffer))
        self.values.copy_(grad.lerp(buffer, self.momentum) if self.nesterov else buffer)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSegment:
    """Elements of one matrix that move in its direction, by ``lr`` (adjusted) after they decayed by ``decay``.

    The weight is as :class:`stronghold.native.Segment` has it, and changed in place. ``squares`` is as above.
    """

    direction: Direction
    values: Tensor
    weight: Tensor
    remainder: Tensor | None
    lr: float
    decay: float
    squares: Tensor | None = None

    @property
    def elements(self) -> int:
        return self.weight.numel()

    def part(self, begin: int, end: int) -> StepSegment:
        """Returns the elements from ``begin`` to ``end``."""
        return self.mapped(lambda tensor: tensor.view(-1)[begin:end])

    def mapped(self, of: Callable[[Tensor], Tensor]) -> StepSegment:
        """Returns the segment with ``of`` applied to its tensors."""
        return replace(
            self,
            values=of(self.values),
            weight=of(self.weight),
            remainder=None if self.remainder is None else of(self.remainder),
        )

    def run(self, threads: int = 1) -> None:
        """Moves the weights, once their direction is there."""
        self.direction.take()
        if self.squares is None and _has_kernel(self.values, self.weight):
            piece = native.Moved(
                direction=self.values, weight=self.weight, remainder=self.remainder, lr=self.lr, decay=self.decay
            )
            native.muon_move(piece, threads=threads)
        else:
            self.run_in_torch()

    def run_in_torch(self) -> None:
        """Does the same by PyTorch's operations, wherever the tensors are."""
        for begin in range(0, self.elements, PART):
            self.part(begin, min(begin + PART, self.elements))._run()

    def _run(self) -> None:
        weight = self.weight if self.remainder is None else join(self.weight, self.remainder)
        moved = weight if self.squares is None else weight.clone()
        moved.mul_(1 - self.decay).add_(self.values, alpha=-self.lr)
        if self.squares is not None:
            weight.copy_(torch.where(torch.isfinite(self.squares), moved, weight))
        if self.remainder is not None:
            split(weight, self.weight, self.remainder)
