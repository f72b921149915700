"""The loss over a large vocabulary, without ever holding all of its logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 128 * 2**20
"""What one chunk of logits may take in fp32."""

BLOCK_BYTES = 32 * 2**20
"""What one block of the weight's gradient may take in fp32."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """Returns ``F.cross_entropy(hidden @ weight.T, labels)``, the mean over labels that are not ignored.

    ``hidden`` is (tokens, width), ``weight`` (vocabulary, width), ``labels`` int64 (tokens); the result is a
    scalar, fp32 (float64 for float64). It goes over ``chunk`` tokens at a time, as many as ``CHUNK_BYTES``
    allow unless told, and computes both gradients while a chunk's logits are there: they are made once, and
    the backward pass only scales. The weight's gradient is accumulated in fp32. Under autocast the matrix
    products run in its dtype. As in PyTorch, no label at all to learn from gives NaN and gradients of zero.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            "hidden must be (tokens, width), weight (vocabulary, width) and labels (tokens) "
            f"(got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}); reshape them"
        )
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    device = hidden.device.type
    compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):  # cast once here, not once per chunk
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, weight, labels, ignore_index, chunk, compute_dtype, torch.is_grad_enabled()
        )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        chunk: int,
        compute_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        # Inside forward autograd is off whatever the caller's mode, so the caller's mode is passed in.
        hidden_grad_wanted = grad_enabled and ctx.needs_input_grad[0]
        weight_grad_wanted = grad_enabled and ctx.needs_input_grad[1]
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        matrix = weight.to(compute_dtype)
        hidden_grad = torch.empty_like(hidden) if hidden_grad_wanted else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if weight_grad_wanted else None
        learned = labels != ignore_index
        count = learned.sum()
        row_scale = torch.where(learned, count.to(sum_dtype).reciprocal(), 0.0)
        targets = torch.where(learned, labels, 0)
        loss_sum = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            inputs = hidden[rows].to(compute_dtype)
            target, valid = targets[rows, None], learned[rows]
            # One fp32 buffer becomes logits, their exponentials, probabilities and gradients in turn.
            logits = (inputs @ matrix.T).to(sum_dtype)
            logits.sub_(logits.amax(dim=1, keepdim=True))
            target_logits = logits.gather(1, target)
            sums = logits.exp_().sum(dim=1, keepdim=True)
            losses = (sums.log() - target_logits).squeeze(1)
            loss_sum += torch.where(valid, losses, 0.0).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            # d loss / d logits = (softmax − one at the target) / count
            scale = row_scale[rows, None]
            logits.mul_(scale / sums).scatter_add_(1, target, -scale)
            logits_grad = logits.to(compute_dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = logits_grad @ matrix
            if weight_grad is None:
                continue
            if compute_dtype == sum_dtype:
                weight_grad.addmm_(logits_grad.T, inputs)
                continue
            for block in _blocks(weight_grad):
                weight_grad[block] += logits_grad[:, block].T @ inputs
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss_sum / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = (hidden_grad * upstream).to(hidden_grad.dtype)
        if weight_grad is not None:
            sums, weight_grad = weight_grad, torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            for block in _blocks(sums):
                weight_grad[block] = sums[block] * upstream
        return hidden_grad, weight_grad, None, None, None, None, None


def _blocks(table: Tensor) -> Iterator[slice]:
    """Yields rows of ``table`` (rows, width) by ``BLOCK_BYTES``, so that what is made on the way is never as large."""
    rows = max(1, BLOCK_BYTES // (table.shape[1] * table.element_size()))
    for begin in range(0, table.shape[0], rows):
        yield slice(begin, begin + rows)
