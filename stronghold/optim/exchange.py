"""State dictionaries in torch.optim.AdamW's format: checked whole before anything is taken from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
