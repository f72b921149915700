"""What a plan's file may hold: values that others took out of it, or wrote into it, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stronghold.settings import check_one_of, check_optimizer

DTYPES = ("float32", "bfloat16")
_COUNTS = ("parameters", "trained_parameters", "layers", "samples", "tokens", "processes")
_OPTIMIZER = ("states", "update")
_MOST = 2**63 - 1
"""What 64 bits hold."""


def check_plan_values(found: Mapping[str, Any]) -> None:
    """Raises ValueError for values of a plan's file that no plan has, and KeyError for those that it lacks."""
    for name in ("model", "machine", "device", "longest"):
        if not isinstance(found[name], str):
            raise ValueError(f"{name} must be a text (got {found[name]!r})")
    check_one_of("dtype", found["dtype"], DTYPES)
    for name, value in found.items():
        least = 1 if name in _COUNTS else 0 if name.endswith("_bytes") else None
        if least is not None and (type(value) is not int or not least <= value <= _MOST):
            raise ValueError(f"{name} must be a whole number of {least} or more, which 64 bits hold (got {value!r})")
    if found["tokens"] % found["samples"]:
        raise ValueError(
            f"tokens must be a multiple of samples (got tokens={found['tokens']}, samples={found['samples']})"
        )
    if not 1 <= found.get("asked_tokens", 1) < float("inf"):
        raise ValueError(f"asked_tokens must be a number of 1 or more (got {found['asked_tokens']!r})")
    if not all(0 < seconds < float("inf") for seconds in found["step_s"]):
        raise ValueError(f"step_s must be three numbers above 0 (got {list(found['step_s'])})")
    check_one_of("updated_by", found.get("updated_by", "AdamW"), ("AdamW", "Muon"))
    for name in found["optimizer"]:
        check_one_of("a key of optimizer", name, _OPTIMIZER)
    check_optimizer(found["optimizer"].get("states", "fp32"), found["optimizer"]["update"], "raise", None)
