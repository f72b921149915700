"""What all processes that train one model must have in common."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def facts_of(model: nn.Module, dtype: torch.dtype | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns it, by name; stores may be each process's own."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    fingerprint = zlib.crc32(repr(parameters).encode())
    return {
        "model": f"{type(model).__name__} of {len(parameters)} parameters, fingerprint {fingerprint:x}",
        "compute type": str(dtype),
        **{name: value for name, value in settings.items() if name != "store"},
    }
