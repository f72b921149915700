"""What a saved moment of AdamW or Muon may be: what no update can have left is refused before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = "momentum_buffer"
NAMES = (*ADAMW, MUON)
_PART = 4 * 2**20
"""Elements that are looked at at a time."""
_FINITE = torch.finfo(torch.float32).max
_LAST_EXPONENT = 246
"""Of a block in eight bits (stronghold.optim.blocks): of any above, codes would stand for no number."""


def moment_in(name: str, parameters: Container[str]) -> str | None:
    """Returns which moment a file's tensor called ``name`` belongs to, one of ``NAMES``; None for others."""
    if name in parameters:
        return None
    parts = name.removesuffix("/exponents").rpartition("/")
    return parts[2] if parts[0] in parameters and parts[2] in NAMES else None


def wrong_moment(values: Tensor, moment: str, *, largest: float = math.inf) -> str | None:
    """Returns which rule the ``values`` of a moment break, or None; no more than a part of them is copied.

    The first moment is finite, as Muon's momentum is; the second is not negative, and infinite where a square was too
    large for fp32: that number is not updated any more, with torch.optim.AdamW neither. NaN would become weights that
    are none. With ``largest`` no number is larger. ``values`` in uint8 are the exponents of one in eight bits.
    """
    flat = values.detach().reshape(-1)
    if flat.dtype == torch.uint8:
        fits = not len(flat) or int(flat.max()) <= _LAST_EXPONENT
        return None if fits else f"exponents must be at most {_LAST_EXPONENT} (got {int(flat.max())})"
    for begin in range(0, len(flat), _PART):
        part = flat[begin : begin + _PART]
        low, high = map(float, torch.aminmax(part if part.dtype == torch.float64 else part.float()))
        bound = min(largest, _FINITE)
        if moment != "exp_avg_sq" and not (-bound <= low and high <= bound):
            return f"must be finite{_limit(largest)} (got {high if -bound <= low else low:g})"
        if moment == "exp_avg_sq" and not (low >= 0 and (high <= bound or high == largest)):
            return f"must be zero or more{_limit(largest)} (got {high if low >= 0 else low:g})"
    return None


def _limit(largest: float) -> str:
    return "" if math.isinf(largest) else f" and at most {largest:g}, for eight bits hold no more"
