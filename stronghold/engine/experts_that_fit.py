"""Into how many experts a part a mixture is cut whose layers do not fit: ``offload(experts_per_part="auto")``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.engine.budget import CUT_APART
from stronghold.engine.experts_part import alike, are_experts
from stronghold.engine.split_experts import adapters_of_experts, fewest_experts, split_experts
from stronghold.errors import BudgetError

_LOG = logging.getLogger("stronghold")


@dataclass(frozen=True)
class Fit:
    """What was found of a model that fits: ``cost`` is lower for a better one, ``found`` is the caller's."""

    cost: float
    found: Any = None


def cut_as_asked(
    model: nn.Module, experts_per_part: int | str | None, fit: Callable[[nn.Module], Fit]
) -> tuple[int | None, Fit]:
    """Returns the experts of a part that ``model`` is to be cut into, None for whole layers, and what ``fit`` says.

    That is as many as are asked for, or for ``"auto"`` as :func:`cut_to_fit` finds. The model is not changed. Raises
    what ``fit`` and :func:`split_experts` raise, and ValueError for what is no number.
    """
    if experts_per_part is None:
        return None, fit(model)
    if experts_per_part == "auto":
        return cut_to_fit(model, fit)
    if isinstance(experts_per_part, int) and not isinstance(experts_per_part, bool):
        return experts_per_part, fit(split_experts(without_values(model), experts_per_part))
    raise ValueError(
        f"experts_per_part must be a number of experts, 'auto' or None (got {experts_per_part!r}); pass 'auto'"
    )


def cut_to_fit(model: nn.Module, fit: Callable[[nn.Module], Fit]) -> tuple[int | None, Fit]:
    """Returns the experts of a part with which ``model`` costs least, None where it fits with whole layers, and how.

    ``fit`` says it of a model, whose experts may have no values, and raises BudgetError where that does not fit. A part
    has all experts of a layer, half of them, a quarter and so on down to one: the first that fits, or a smaller one as
    long as smaller ones cost less. The model is not changed. Raises BudgetError where nothing fits.
    """
    try:
        return None, fit(model)
    except BudgetError as error:
        problem = error
        if adapters_of_experts(model) is not None:
            raise BudgetError(
                f"{str(error).removesuffix(CUT_APART)}; experts with adapters of their own are not cut apart: name "
                "other layers by target_modules=, such as the attention's"
            ) from error
    number = fewest_experts(model)
    best: tuple[int, Fit] | None = None
    while number:
        try:
            fits = fit(split_experts(without_values(model), number))
        except BudgetError as error:
            problem = error
        else:
            if best is not None and fits.cost > best[1].cost:
                break
            if best is None or fits.cost < best[1].cost:
                best = number, fits
        number //= 2
    if best is None:
        raise problem
    name = type(model).__name__
    _LOG.info("layers of %s do not fit, and go through the window in parts of up to %d experts", name, best[0])
    return best


def without_values(model: nn.Module) -> nn.Module:
    """Returns a model as ``model``, with its parameters but for the experts', which are on the meta device."""
    modules: dict[nn.Module, nn.Module] = {}
    empty: dict[int, nn.Parameter] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in modules:
            other = modules[module] = alike(module)
            other._modules.update((name, copied(child)) for name, child in module._modules.items() if child is not None)
            if are_experts(module):
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) not in empty:
                        nothing = torch.empty_like(parameter, device="meta")
                        empty[id(parameter)] = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
                    other._parameters[name] = empty[id(parameter)]
        return modules[module]

    return copied(model)
