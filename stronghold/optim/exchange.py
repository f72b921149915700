"""State dictionaries as torch.optim.AdamW and Muon have them: checked whole before anything is taken from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stronghold.formats.moments import wrong_moment
from stronghold.native import Blocks
from stronghold.optim.blocks import LARGEST, decode, encode
from stronghold.optim.groups import check_saved_group, check_saved_step
from stronghold.optim.muon_groups import check_saved_muon_group, is_muon
from stronghold.optim.states import ADAMW_MOMENTS, MUON_MOMENTS, Moment, ParameterState, as_state, moments_of


def checked_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], *, eight_bits: bool
) -> dict[int, dict[str, Any]]:
    """Returns the states by the number of their parameter, counted through ``groups``.

    ``eight_bits`` is what their moments are to go into. Raises ValueError where the dictionary's groups, entries,
    shapes or dtypes are not those of AdamW, or of Muon, for these groups, or the values of a moment cannot be.
    """
    try:
        states, saved = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
        keys = [list(group["params"]) for group in saved]
    except (KeyError, TypeError, ValueError):
        raise no_state_dict(state_dict) from None
    lengths, wanted = [len(group) for group in keys], [len(g["params"]) for g in groups]
    if lengths != wanted:
        raise ValueError(
            f"the state dictionary must have this optimizer's parameter groups (got groups of {lengths} parameters for "
            f"groups of {wanted}); build the optimizer with the groups it was saved from"
        )
    for group, own in zip(saved, groups, strict=True):
        (check_saved_muon_group if is_muon(own) else check_saved_group)(group)
    by_muon = [is_muon(group) for group in groups for _ in group["params"]]
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
        number = numbers[key]
        names = MUON_MOMENTS if by_muon[number] else ADAMW_MOMENTS
        loaded[number] = _checked_state(key, state, parameters[number], names, eight_bits=eight_bits)
    return loaded


def no_state_dict(given: Any) -> ValueError:
    """Returns the error for what is no optimizer's state dictionary."""
    got = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
    return ValueError(
        f"a state dictionary must have 'state' and 'param_groups', each group with its 'params' (got {got}); pass "
        "what optimizer.state_dict() returned"
    )


def _checked_state(
    key: Any, state: Any, parameter: Tensor, moments: Sequence[str], *, eight_bits: bool
) -> dict[str, Any]:
    entries, optimizer = ("step", *moments) if len(moments) > 1 else moments, "AdamW" if len(moments) > 1 else "Muon"
    names = sorted(map(str, state)) if isinstance(state, dict) else [type(state).__name__]
    if names != sorted(entries):
        raise ValueError(
            f"the state of parameter {key} must have {', '.join(entries)} (got {', '.join(names)}); it was saved by "
            f"another optimizer than {optimizer}"
        )
    for name in moments:
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
                f"{name} of parameter {key} {wrong}, and {optimizer} would make weights of it; load a state that was "
                "saved before"
            )
    check_saved_step(state.get("step", 0), key)
    return state


def as_saved(state: ParameterState, shape: torch.Size) -> dict[str, Any]:
    """Returns one parameter's state as torch.optim has it: 8-bit moments as copies in fp32, and no step of Muon's."""
    if moments_of(state) == MUON_MOMENTS:
        return {name: state[name] for name in MUON_MOMENTS}
    if not isinstance(state["exp_avg"], Blocks):
        return {**state}
    exp_avg, exp_avg_sq = decode(state["exp_avg"], signed=True), decode(state["exp_avg_sq"], signed=False)
    return {**state, "exp_avg": exp_avg.view(shape), "exp_avg_sq": exp_avg_sq.view(shape)}


def take_saved(saved: dict[str, Any], moments: tuple[Moment, ...]) -> ParameterState:
    """Copies one parameter's saved state into ``moments``; returns the state that holds them."""
    for moment, name in zip(moments, moments_of(saved), strict=True):
        if isinstance(moment, Blocks):
            values = saved[name].detach().to(moment.codes.device, torch.float32).contiguous().view(-1)
            encode(values, moment, signed=name == "exp_avg", step=None)
        else:
            moment.copy_(saved[name].detach())
    return as_state(float(saved.get("step", 0)), moments)
