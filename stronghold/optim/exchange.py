"""State dictionaries in torch.optim.AdamW's format: checked whole before anything is taken from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stronghold.native import Blocks
from stronghold.optim.blocks import decode, encode
from stronghold.optim.groups import check_group
from stronghold.optim.states import Moment

_ENTRIES = ("step", "exp_avg", "exp_avg_sq")
_STEPS = 2**53
"""From where on a number of steps has no next one in float64."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def checked_states(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the states by the number of their parameter, counted through ``groups``.

    Raises ValueError where the dictionary's groups, entries, shapes or dtypes are not those of AdamW for these groups.
    """
    try:
        states, saved = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
        keys = [list(group["params"]) for group in saved]
    except (KeyError, TypeError, ValueError):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(
            f"a state dictionary must have 'state' and 'param_groups', each group with its 'params' (got {got}); pass "
            "what optimizer.state_dict() returned"
        ) from None
    lengths, wanted = [len(group) for group in keys], [len(g["params"]) for g in groups]
    if lengths != wanted:
        raise ValueError(
            f"the state dictionary must have this optimizer's parameter groups (got groups of {lengths} parameters for "
            f"groups of {wanted}); build the optimizer with the groups it was saved from"
        )
    for group in saved:
        _check_settings(group)
    parameters = [p for group in groups for p in group["params"]]
    numbers = {key: i for i, key in enumerate(key for group in keys for key in group)}
    loaded = {}
    for key, state in states.items():
        if key not in numbers:
            raise ValueError(f"the state dictionary has a state for parameter {key!r}, which none of its groups has")
        loaded[numbers[key]] = _checked_state(key, state, parameters[numbers[key]])
    return loaded


def _check_settings(group: dict[str, Any]) -> None:
    if missing := [name for name in _SETTINGS if name not in group]:
        raise ValueError(
            f"every group of the state dictionary must have {', '.join(_SETTINGS)} (got one without "
            f"{', '.join(missing)}); it was saved by another optimizer than AdamW"
        )
    if group.get("amsgrad") or group.get("maximize") or not group.get("decoupled_weight_decay", True):
        raise ValueError(
            "a state dictionary with amsgrad, maximize or coupled weight decay (Adam's) cannot be taken over by this "
            "optimizer"
        )
    try:
        check_group(group)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the settings in the state dictionary's groups must be AdamW's numbers ({error}); it was saved by another "
            "optimizer, or altered"
        ) from None


def _checked_state(key: Any, state: Any, parameter: Tensor) -> dict[str, Any]:
    names = sorted(map(str, state)) if isinstance(state, dict) else [type(state).__name__]
    if names != sorted(_ENTRIES):
        raise ValueError(
            f"the state of parameter {key} must have {', '.join(_ENTRIES)} (got {', '.join(names)}); it was saved by "
            "another optimizer than AdamW"
        )
    for name in _ENTRIES[1:]:
        moment = state[name]
        fits = (
            isinstance(moment, Tensor)
            and moment.shape == parameter.shape
            and moment.is_floating_point()
            and moment.layout == torch.strided
            and not moment.is_meta
        )
        if not fits:
            got = f"{tuple(moment.shape)} {moment.dtype}" if isinstance(moment, Tensor) else type(moment).__name__
            raise ValueError(
                f"{name} of parameter {key} must be a dense floating-point tensor of shape {tuple(parameter.shape)}, "
                f"with values (got {got})"
            )
    try:
        step = float(state["step"])
    except (TypeError, ValueError):
        step = math.nan
    if not (0 <= step < _STEPS and step.is_integer()):
        raise ValueError(
            f"step of parameter {key} must be a whole number from 0 to 2**53 (got {state['step']!r}); "
            "the state dictionary was altered"
        )
    return state


def as_saved(state: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Returns one parameter's state as torch.optim.AdamW has it: 8-bit moments as copies in fp32."""
    if not isinstance(state["exp_avg"], Blocks):
        return state
    exp_avg, exp_avg_sq = decode(state["exp_avg"], signed=True), decode(state["exp_avg_sq"], signed=False)
    return {**state, "exp_avg": exp_avg.view(shape), "exp_avg_sq": exp_avg_sq.view(shape)}


def take_saved(saved: dict[str, Any], moments: tuple[Moment, Moment]) -> dict[str, Any]:
    """Copies one parameter's saved state into ``moments``; returns the state that holds them."""
    for moment, name in zip(moments, _ENTRIES[1:], strict=True):
        if isinstance(moment, Blocks):
            values = saved[name].detach().to(moment.codes.device, torch.float32).contiguous().view(-1)
            encode(values, moment, signed=name == "exp_avg", step=None)
        else:
            moment.copy_(saved[name].detach())
    step = torch.tensor(float(saved["step"]), dtype=torch.float32)
    return {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
