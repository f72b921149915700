"""State dictionaries in torch.optim.AdamW's format: checked whole before anything is taken from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stronghold.native import Blocks
from stronghold.optim.blocks import decode, encode
from stronghold.optim.states import Moment

_ENTRIES = ("step", "exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def checked_states(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the states by the number of their parameter, counted through ``groups``.

    Raises ValueError where the dictionary's groups, entries, shapes or dtypes are not those of AdamW for these groups.
    """
    try:
        states, saved = dict(state_dict["state"]), list(state_dict["param_groups"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "a state dictionary must have 'state' and 'param_groups' "
            f"(got {sorted(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__}); "
            "pass what optimizer.state_dict() returned"
        ) from None
    lengths, wanted = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if lengths != wanted:
        raise ValueError(
            f"the state dictionary must have this optimizer's parameter groups (got groups of {lengths} parameters for "
            f"groups of {wanted}); build the optimizer with the groups it was saved from"
        )
    for group in saved:
        if missing := [name for name in _SETTINGS if name not in group]:
            raise ValueError(
                f"every group of the state dictionary must have {', '.join(_SETTINGS)} (got one without "
                f"{', '.join(missing)}); it was saved by another optimizer than AdamW"
            )
        if group.get("amsgrad") or group.get("maximize") or not group.get("decoupled_weight_decay", True):
            raise ValueError(
                "a state dictionary with amsgrad, maximize or coupled weight decay (Adam's) cannot be taken over by "
                "this optimizer"
            )
    parameters = [p for group in groups for p in group["params"]]
    numbers = {key: i for i, key in enumerate(key for group in saved for key in group["params"])}
    loaded = {}
    for key, state in states.items():
        if key not in numbers:
            raise ValueError(f"the state dictionary has a state for parameter {key!r}, which none of its groups has")
        parameter = parameters[numbers[key]]
        if sorted(state) != sorted(_ENTRIES):
            raise ValueError(
                f"the state of parameter {key} must have {', '.join(_ENTRIES)} (got {', '.join(sorted(state))}); "
                "it was saved by another optimizer than AdamW"
            )
        for name in _ENTRIES[1:]:
            moment = state[name]
            if not isinstance(moment, Tensor) or moment.shape != parameter.shape or not moment.is_floating_point():
                got = f"{tuple(moment.shape)} {moment.dtype}" if isinstance(moment, Tensor) else type(moment).__name__
                raise ValueError(
                    f"{name} of parameter {key} must be a floating-point tensor of shape {tuple(parameter.shape)} "
                    f"(got {got})"
                )
        if not float(torch.as_tensor(state["step"])) >= 0:
            raise ValueError(f"step of parameter {key} must be zero or more (got {state['step']})")
        loaded[numbers[key]] = state
    return loaded


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
            values = saved[name].to(moment.codes.device, torch.float32).contiguous().view(-1)
            encode(values, moment, signed=name == "exp_avg", step=None)
        else:
            moment.copy_(saved[name])
    step = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu").clone()
    return {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
