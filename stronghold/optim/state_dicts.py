"""State dictionaries in torch.optim's format, saved and loaded by torch's own order of hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from stronghold.optim.exchange import as_saved, checked_states, no_state_dict, take_saved
from stronghold.unit import Unit, unit_of

if TYPE_CHECKING:
    from stronghold.optim.host_adamw import HostAdamW


def saved(optimizer: HostAdamW) -> dict[str, Any]:
    """Returns the optimizer's state dictionary; the user's hooks see it as torch.optim's would be."""

    def convert(_: Optimizer, result: dict[str, Any]) -> dict[str, Any]:
        parameters = _parameters(optimizer)
        states = {n: as_saved(state, parameters[n].shape) for n, state in result["state"].items() if state}
        return {**result, "state": states}

    handle = optimizer.register_state_dict_post_hook(convert, prepend=True)
    try:
        return Optimizer.state_dict(optimizer)
    finally:
        handle.remove()


def load(optimizer: HostAdamW, state_dict: Any) -> None:
    """Loads what the user's hooks make of a state dictionary, and takes no copy of its moments.

    The hooks that come before see the dictionary whole, and those behind an optimizer that has its states. Raises what
    refuses the dictionary, before anything has changed.
    """
    loaded: dict[int, dict[str, Any]] = {}

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        loaded.update(checked_states(given, optimizer.param_groups, eight_bits=optimizer.states == "8bit"))
        _provide(optimizer, loaded)
        optimizer.wait()
        # Without states, for torch would cast moments to their parameters' dtype.
        return {"state": {}, "param_groups": optimizer.groups_from(given["param_groups"])}

    def take(_: Optimizer) -> None:
        optimizer.__dict__.pop("state", None)  # where torch's __setstate__ puts it, and the property does not look
        optimizer.state = _taken(optimizer, loaded)

    if not isinstance(state_dict, Mapping):
        raise no_state_dict(state_dict)
    before = optimizer.register_load_state_dict_pre_hook(check)
    behind = optimizer.register_load_state_dict_post_hook(take, prepend=True)
    try:
        Optimizer.load_state_dict(optimizer, dict(state_dict))
    finally:
        before.remove()
        behind.remove()


def _parameters(optimizer: HostAdamW) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _placed(optimizer: HostAdamW, loaded: Mapping[int, Any]) -> Iterator[tuple[int, Tensor, Unit, int]]:
    """Yields the number of each parameter with a loaded state, and it with its unit and its index there."""
    for number, parameter in enumerate(_parameters(optimizer)):
        if number in loaded and (unit := unit_of(parameter)) is not None:  # type: ignore[arg-type]
            yield number, parameter, unit, parameter.__dict__["_index"]


def _provide(optimizer: HostAdamW, loaded: Mapping[int, Any]) -> None:
    missing: dict[Unit, list[int]] = {}
    for _, _, unit, index in _placed(optimizer, loaded):
        missing.setdefault(unit, []).append(index)
    optimizer.provide(missing)


def _taken(optimizer: HostAdamW, loaded: Mapping[int, dict[str, Any]]) -> defaultdict[Tensor, Any]:
    states: defaultdict[Tensor, Any] = defaultdict(dict)
    for number, parameter, unit, index in _placed(optimizer, loaded):
        unit.mark_dirty()
        states[parameter] = take_saved(loaded[number], optimizer.moments_of(unit, index))
    return states
