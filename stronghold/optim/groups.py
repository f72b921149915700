"""What may be in a parameter group, and what is checked of it."""

from __future__ import annotations

from typing import Any

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


def check_group(group: dict[str, Any]) -> None:
    lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers (got {betas!r}), such as (0.9, 0.999)")
    beta1, beta2 = betas
    for name, value, good in (
        ("lr", lr, float(lr) >= 0),
        ("betas", (beta1, beta2), 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
    ):
        if not good:
            rule = "both in [0, 1)" if name == "betas" else "zero or more"
            raise ValueError(f"{name} must be {rule} (got {value})")
    for name, supported in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if bool(group.get(name, supported)) is not supported:
            raise ValueError(f"{name}={not supported} is not supported (got it in a parameter group); leave it out")
