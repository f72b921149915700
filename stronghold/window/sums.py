"""Sums of gradients, and of their squares, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stronghold import native
from stronghold.split import SPLIT, join, split
from stronghold.unit import has_company

PART = 4 * 2**20
"""Elements of a sum in two halves that are added up at a time: what bounds the temporary memory."""
_OF_EACH, _OF_SPLIT, _OF_NEXT = 4, 13, 4
"""What that takes of each of these elements, and of those that are split at a time, of one part or of several."""


def add_scratch_bytes(elements: int) -> int:
    """Returns what :func:`add` takes on a device, beside its arguments, for so many elements in two halves."""
    of_split = _OF_SPLIT + (_OF_NEXT if elements > SPLIT else 0)
    return min(elements, PART) * _OF_EACH + min(elements, SPLIT) * of_split


def write_squares(
    gradients: Sequence[Tensor], targets: Sequence[Tensor], threads: int, found_inf: Tensor | None = None
) -> None:
    """Writes the sum of squares of each gradient to its float64 target, all on one device, as :func:`spread` does."""
    spread(squares_of(gradients, threads), targets, found_inf)


def squares_of(gradients: Sequence[Tensor], threads: int) -> Tensor:
    """Returns the sum of squares of each gradient, float64, on the device they are on.

    On the CPU the sums are exact in float64 and the same however they are cut; on a GPU they are taken in fp32.
    """
    if gradients[0].is_cpu:
        return torch.tensor(native.squared_norms(gradients, threads=threads), dtype=torch.float64, device="cpu")
    return torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)).double().square_()


def spread(squares: Tensor, targets: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Writes each of ``squares`` to its target, as :func:`noted` has it; ``found_inf`` is float64."""
    torch._foreach_copy_(list(targets), list(noted(squares, found_inf).unbind()))


def noted(squares: Tensor, found_inf: Tensor | None) -> Tensor:
    """Returns ``squares``, changed in place: all NaN where one is not finite or ``found_inf`` is, which becomes so."""
    if found_inf is None:
        return squares
    found_inf.add_(squares.sum(), alpha=0)  # zero, or NaN for what is not finite
    return squares.add_(found_inf)


def add(
    targets: Sequence[Tensor], remainders: Sequence[Tensor | None], sources: Sequence[Tensor], threads: int
) -> Tensor:
    """Adds each gradient to the sum that its target and remainder hold, in fp32, on the one device they are on.

    Returns the sum of squares of what each came to, float64, on that device.
    """
    together = zip(targets, remainders, sources, strict=True)
    if targets[0].is_cpu:
        additions = [native.Addition(target=target, remainder=low, source=source) for target, low, source in together]
        return torch.tensor(native.accumulate(additions, threads=threads), dtype=torch.float64, device="cpu")
    norms = []
    for target, remainder, source in together:
        if remainder is None:
            norms.append(torch.linalg.vector_norm(target.add_(source), dtype=torch.float32))
        else:
            norms.append(_add_halves(target, remainder, source))
    return torch.stack(norms).double().square()


def _add_halves(target: Tensor, remainder: Tensor, source: Tensor) -> Tensor:
    """Adds ``source`` to the sum in two halves, part by part, for it takes memory in fp32; returns the sum's norm."""
    norms = []
    for high, low, more in zip(*(one.view(-1).split(PART) for one in (target, remainder, source)), strict=True):
        total = join(high, low).add_(more)
        split(total, high, low)
        norms.append(torch.linalg.vector_norm(total, dtype=torch.float32))
        del total
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def in_own_memory(gradient: Tensor) -> Tensor:
    """Returns a gradient as autograd gave it, dense, in memory that is no other's: what is written next is it alone.

    Gradients may share memory, as those of parameters that were stacked and summed do.
    """
    return gradient.clone(memory_format=torch.contiguous_format) if has_company(gradient) else gradient.contiguous()


def apart(gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Returns dense ``gradients``, by index, with copies of those that overlap one before them in memory."""
    result, reached = dict(gradients), 0
    for begin, index in sorted((gradient.data_ptr(), index) for index, gradient in gradients.items()):
        if begin < reached:
            result[index] = gradients[index].clone()
        reached = max(reached, begin + gradients[index].nbytes)
    return result


def raw(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.detach()


def fits(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient that the user may have put there is one that the host's kernel adds to."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.is_cpu and gradient.dtype == dtype and gradient.is_contiguous()
