"""What may be in a parameter group, and what is checked of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit, unit_of

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


_IMPLEMENTATIONS = "the host's cores update by one fused kernel, whatever is passed: leave it out"
_OTHERWISE = {
    "amsgrad": "leave it out, or step the same parameters with torch.optim.AdamW",
    "maximize": "leave it out, and negate the loss",
    "differentiable": "leave it out",
    "foreach": _IMPLEMENTATIONS,
    "fused": _IMPLEMENTATIONS,
    "capturable": _IMPLEMENTATIONS,
}


def settings_now(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of each group as they are now, without what else the user keeps in one."""
    names = {**TORCH_DEFAULTS, **dict.fromkeys(_SETTINGS), **optimizer.defaults}  # Muon's own have no betas
    return [
        {name: _as_it_is(value) for name, value in group.items() if name in names} for group in optimizer.param_groups
    ]


def _as_it_is(value: Any) -> Any:
    """Returns a setting that nobody changes any more."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_as_it_is, value)) if isinstance(value, (list, tuple)) else value


def settings_in_common(optimizer: Any) -> dict[str, Any]:
    """Returns by name what the user has set that an update by ``optimizer`` depends on, equal numbers alike."""
    found = {name: getattr(optimizer, name) for name in ("max_grad_norm", "nonfinite", "states")}
    for number, group in enumerate(settings_now(optimizer)):
        found |= {f"{name} of group {number}": value for name, value in group.items()}
    return {name: as_float(value) for name, value in found.items()}


def as_float(value: Any) -> Any:
    """Returns a setting by which equal numbers are alike, be they integers, floats or tensors."""
    if isinstance(value, tuple):
        return tuple(map(as_float, value))
    return float(value) if is_number(value) else value


def check_torch_arguments(arguments: dict[str, Any]) -> None:
    """Raises ValueError for one of torch.optim.AdamW's that asks for something, TypeError for one of nobody's."""
    for name, value in arguments.items():
        if name not in _OTHERWISE:
            raise TypeError(f"AdamW.__init__() got an unexpected keyword argument {name!r}")
        if value is not False and value is not TORCH_DEFAULTS[name]:
            raise ValueError(
                f"{name} must be {TORCH_DEFAULTS[name]} in stronghold.AdamW (got {value!r}); {_OTHERWISE[name]}"
            )


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that are out of range, or that the update would not heed."""
    lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers (got {betas!r}), such as (0.9, 0.999)")
    for name, values in (("lr", [lr]), ("betas", betas), ("eps", [eps]), ("weight_decay", [weight_decay])):
        below = 1.0 if name == "betas" else math.inf
        if not all(is_number(value) and 0 <= float(value) < below for value in values):
            rule = "two numbers in [0, 1)" if name == "betas" else "a number, zero or more"
            raise ValueError(f"{name} must be {rule} (got {tuple(betas) if name == 'betas' else values[0]!r})")
    for name, supported in _KINDS:
        if bool(group.get(name, supported)) is not supported:
            raise ValueError(f"{name}={not supported} is not supported (got it in a parameter group); leave it out")
    if group.get("use_muon", False):
        raise ValueError("use_muon=True is for stronghold.Muon (got it in a parameter group of AdamW); use that class")


_KINDS = (("amsgrad", False), ("maximize", False), ("differentiable", False), ("decoupled_weight_decay", True))
"""What would make another update of it, and what it must be."""


_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_STEPS = 2**53
"""From where on a number of steps has no next one in float64."""


def check_saved_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a group, from wherever it was saved, that is not one of AdamW's."""
    if group.get("amsgrad") or group.get("maximize") or not group.get("decoupled_weight_decay", True):
        raise ValueError(
            "a state dictionary with amsgrad, maximize or decoupled_weight_decay=False (Adam's) cannot be taken over "
            "by this optimizer"
        )
    check_saved_settings(group, _SETTINGS, check_group, "AdamW")


def check_saved_settings(
    group: Mapping[str, Any], names: Sequence[str], check: Callable[[Mapping[str, Any]], None], optimizer: str
) -> None:
    """Raises ValueError for a saved group that lacks one of ``names``, or that ``check`` refuses."""
    if missing := [name for name in names if name not in group]:
        raise ValueError(
            f"every group of the state dictionary must have {', '.join(names)} (got one without "
            f"{', '.join(missing)}); it was saved by another optimizer than {optimizer}"
        )
    try:
        check(group)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the settings in the state dictionary's groups must be {optimizer}'s numbers ({error}); it was saved by "
            "another optimizer, or altered"
        ) from None


def check_saved_step(step: Any, parameter: object) -> None:
    """Raises ValueError for what is no number of steps."""
    try:
        number = float(step)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not (0 <= number < _STEPS and number.is_integer()):
        raise ValueError(
            f"step of parameter {parameter} must be a whole number from 0 to 2**53 (got {step!r}); "
            "the state dictionary was altered"
        )


_FIRST = "call stronghold.offload(model) first, and pass that model's parameters()"
_OUTSIDE = (
    f"{_FIRST}. What is put around an offloaded model is no part of it, such as the prompt encoders of PEFT: put it "
    "there first and offload the whole, or have an optimizer of torch's train it"
)


def units_of(params: Sequence[Any], owner: object | None) -> list[Unit]:
    """Returns the unit of each of ``params``, which are parameters, or pairs of a name and one.

    Raises TypeError for anything else, OffloadedModelError where they do not all belong to one model: that of
    ``owner``, if it is given.
    """
    units: list[Unit] = []
    for item in params:
        parameter = item[1] if isinstance(item, tuple) else item
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters must be tensors, or pairs of a name and one (got {type(item).__name__})")
        unit = unit_of(parameter) if isinstance(parameter, nn.Parameter) else None
        if unit is None or unit.owner is None or (owner is not None and unit.owner is not owner):
            what, remedy = ("no offloaded model", _OUTSIDE) if unit is None else ("another", _FIRST)
            if parameter.is_meta:
                what, remedy = f"{what}, on the meta device", "give it values before it has an optimizer"
            raise OffloadedModelError(
                f"every parameter must belong to one offloaded model (got one of shape {tuple(parameter.shape)} "
                f"that belongs to {what}); {remedy}"
            )
        owner = unit.owner
        units.append(unit)
    return units


def check_groups(
    groups: Sequence[dict[str, Any]], numbers: Mapping[int, int], check: Callable[[Mapping[str, Any]], None]
) -> None:
    """Checks the groups as they are now, each by ``check``: the user may write into them at any time.

    ``numbers`` has the group of each parameter, by its id, as the optimizer was told. Raises ValueError, and
    OffloadedModelError where the groups have other parameters.
    """
    known = 0
    for number, group in enumerate(groups):
        check(group)
        known += sum(numbers.get(id(parameter)) == number for parameter in group["params"])
    given = sum(len(group["params"]) for group in groups)
    if known != given or known != len(numbers):
        raise OffloadedModelError(
            f"the parameter groups must be those that the optimizer was given (got {given} parameters in {len(groups)} "
            f"groups, {known} of {len(numbers)} where they were); add a group by add_param_group(), freeze parameters "
            "by requires_grad_(False), or build the optimizer anew"
        )
