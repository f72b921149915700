"""Whether a model keeps the rows of a packed sample apart, looked at before it trains on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""What logits may differ by, beside the largest of them, for the order of operations."""


def check_apart(model: nn.Module, *, vocabulary: int, device: torch.device) -> None:
    """Raises ValueError where a row of a packed sample sees the one before it.

    A packed sample has no mask of its own: TRL gives positions that begin anew with each row, and transformers makes
    the mask of them, for attention in plain PyTorch as for flash attention. Layers that are no attention, or a model
    that passes its positions by, do not heed them. So one row is computed behind two different ones, in batches as TRL
    makes them for training, and its logits must stay.
    """
    count = min(vocabulary, 8)
    row = [number % vocabulary for number in range(count)]
    befores = row[::-1], [(number + vocabulary // 2) % vocabulary for number in row]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            first, second = (_behind(model, before, row, device) for before in befores)
    finally:
        model.train(was_training)
    dtype = torch.bfloat16 if any(p.dtype == torch.bfloat16 for p in model.parameters()) else torch.float32
    moved, largest = (first - second).abs().max().item(), first.abs().max().item()
    if not moved <= _CLOSE[dtype] * largest:
        raise ValueError(
            f"rows that are packed must not see one another (got a {type(model).__name__}, where logits of up to "
            f"{largest:.3g} move by {moved:.3g} with the row before); leave out --packing"
        )


def _behind(model: nn.Module, before: list[int], row: list[int], device: torch.device) -> torch.Tensor:
    """Returns the logits of ``row``, packed behind ``before``, on the CPU in fp32."""
    ids = [*before, *row]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch: dict[str, Any] = collate([{"input_ids": ids, "labels": ids, "seq_lengths": [len(before), len(row)]}])
    given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}
    del given["labels"]
    logits: torch.Tensor = model(**given, use_cache=False).logits
    return logits[0, len(before) :].float().cpu()
