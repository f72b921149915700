"""State dictionaries in torch.optim.AdamW's format: checked whole before anything is taken from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stronghold.formats.moments import wrong_moment
from stronghold.native import Blocks
from stronghold.optim.blocks import LARGEST, decode, encode
from stronghold.optim.groups import check_saved_group, check_saved_step
from stronghold.optim.states import Moment

_ENTRIES = ("step", "exp_avg", "exp_avg_sq")


def checked_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], *, eight_bits: bool
) -> dict[int, dict[str, Any]]:
    """Returns the states by the number of their parameter, counted through ``groups``.

    ``eight_bits`` is what their moments are to go into. Raises ValueError where the dictionary's groups, entries,
    shapes or dtypes are not those of AdamW for these groups, or the values of a moment cannot be.
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
        check_saved_group(group)
    parameters = [p for group in groups for p in group["params"]]
    try:
        numbers = {key: i for i, key in enumerate(key for group in keys for key in group)}
    except TypeError:
        numbers = {}
    if len(numbers) < len(parameters):
        raise ValueError(
            f"a state dictionary must name each parameter of its groups once (got {keys}); it was altered"[:400]
        )
    loaded = {}
    for key, state in states.items():
        if key not in numbers:
            raise ValueError(f"the state dictionary has a state for parameter {key!r}, which none of its groups has")
        loaded[numbers[key]] = _checked_state(key, state, parameters[numbers[key]], eight_bits=eight_bits)
    return loaded


def _checked_state(key: Any, state: Any, parameter: Tensor, *, eight_bits: bool) -> dict[str, Any]:
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
        if wrong := wrong_moment(moment, name, largest=LARGEST if eight_bits else math.inf):
            raise ValueError(
                f"{name} of parameter {key} {wrong}, and AdamW would make weights of it; load a state that was saved "
                "before"
            )
    check_saved_step(state["step"], key)
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
