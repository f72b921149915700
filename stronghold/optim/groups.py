"""What may be in a parameter group, and what is checked of it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import Tensor

TORCH_DEFAULTS = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch.optim.AdamW keeps in its groups beside ours, so that state dictionaries fit both ways."""


def check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))} (got {value!r})")


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_group(group: dict[str, Any]) -> None:
    lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers (got {betas!r}), such as (0.9, 0.999)")
    for name, values in (("lr", [lr]), ("betas", betas), ("eps", [eps]), ("weight_decay", [weight_decay])):
        below = 1.0 if name == "betas" else math.inf
        if not all(is_number(value) and 0 <= float(value) < below for value in values):
            rule = "two numbers in [0, 1)" if name == "betas" else "a number, zero or more"
            raise ValueError(f"{name} must be {rule} (got {tuple(betas) if name == 'betas' else values[0]!r})")
    for name, supported in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if bool(group.get(name, supported)) is not supported:
            raise ValueError(f"{name}={not supported} is not supported (got it in a parameter group); leave it out")
