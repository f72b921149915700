"""What all processes that train one model must have in common."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def facts_of(model: nn.Module, dtype: torch.dtype | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns it, by name; stores may be each process's own. Raises ValueError for what is planned for one process."""
    _check_for_several(settings)
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    fingerprint = zlib.crc32(repr(parameters).encode())
    return {
        "model": f"{type(model).__name__} of {len(parameters)} parameters, fingerprint {fingerprint:x}",
        "compute type": str(dtype),
        **{name: value for name, value in settings.items() if name != "store"},
    }


def _check_for_several(settings: Mapping[str, Any]) -> None:
    given = [name for name in ("plan", "inputs", "experts_per_part") if settings.get(name) is not None]
    given += [name for name in ("activations", "micro_batch") if settings.get(name) == "auto"]
    if given:
        value = repr(settings[given[0]]) if isinstance(settings[given[0]], str) else type(settings[given[0]]).__name__
        raise ValueError(
            f"{given[0]}= is what offload() plans one process with (got {value}, and several processes); pass "
            "**stronghold.plan(model, …, processes=N).settings, or values, and split experts by split_experts() before"
        )
