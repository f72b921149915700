"""What may be in a group of ``stronghold.Muon``, and what is checked of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stronghold.optim.groups import TORCH_DEFAULTS, check_saved_group, check_saved_settings, is_number

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's, of the quintic iteration, whose slope at zero is the largest."""
MUON_DEFAULTS = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
"""What ``torch.optim.Muon`` keeps in its groups."""
ADAMW_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, **TORCH_DEFAULTS}
"""What ``torch.optim.AdamW`` keeps in its own, as it is by default."""
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 100


def is_muon(group: Mapping[str, Any]) -> bool:
    """Whether a group is updated by Muon, rather than by AdamW."""
    return bool(group.get("use_muon", False))


def check_muon_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that are out of range."""
    for name in ("lr", "weight_decay", "eps", "momentum"):
        value = group[name]
        if not (is_number(value) and 0 <= float(value) < math.inf):
            raise ValueError(f"{name} must be a number, zero or more (got {value!r})")
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    three = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    if not (three and all(is_number(c) and math.isfinite(float(c)) for c in coefficients)):
        raise ValueError(f"ns_coefficients must be three numbers (got {coefficients!r}), such as {COEFFICIENTS}")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < _MOST_STEPS:
        raise ValueError(f"ns_steps must be a whole number from 0 to {_MOST_STEPS - 1} (got {steps!r}); 5 is usual")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(
            f"adjust_lr_fn must be one of {', '.join(map(repr, _ADJUSTMENTS))} (got {group['adjust_lr_fn']!r})"
        )


def check_saved_muon_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a group, from wherever it was saved, that is not one of Muon's."""
    check_saved_settings(group, tuple(MUON_DEFAULTS), check_muon_group, "Muon")


def check_saved(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a saved group that is neither Muon's nor AdamW's, by what it says of itself."""
    (check_saved_muon_group if is_muon(group) else check_saved_group)(group)


def check_matrices(parameters: Sequence[Tensor], model: nn.Module | None) -> None:
    """Raises ValueError for what Muon is not for: all that is no matrix, and embeddings of ``model``."""
    embeddings = {
        id(module.weight): name
        for name, module in (model.named_modules() if model is not None else ())
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    for parameter in parameters:
        if parameter.ndim != 2 or not parameter.numel():
            own = model.named_parameters() if model is not None else ()
            name = next((name for name, known in own if known is parameter), "a parameter")
            raise ValueError(
                f"Muon updates matrices alone (got {name}, of shape {tuple(parameter.shape)}); put it into a group "
                "with use_muon=False, which AdamW updates"
            )
        if id(parameter) in embeddings:
            raise ValueError(
                f"Muon is for matrices between hidden layers, and not for an embedding (got {embeddings[id(parameter)]}"
                f".weight, of shape {tuple(parameter.shape)}); put it, and a head tied to it, into a group with "
                "use_muon=False, which AdamW updates"
            )
