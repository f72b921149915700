"""Initialising a part of a model as it would be initialised within the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Initialise = Callable[[nn.Module], object]


def as_within(model: nn.Module, initialise: Initialise) -> Initialise:
    """Returns ``initialise`` for those modules of ``model`` that this process has, in any order.

    Each parameter gets the values that it has in one process from the same seed of torch's generator on the CPU. What
    the modules before one draw, in the order of ``nn.Module.apply``, is drawn once and thrown away, with one module's
    parameters in memory at a time; the generator's state before each module, 5 kB, is kept for those that come later.
    """
    visited: list[nn.Module] = []
    model.apply(visited.append)
    modules = list({id(module): module for module in visited}.values())
    place_of = {id(module): place for place, module in enumerate(modules)}
    states: list[Tensor] = [torch.get_rng_state()]
    """The generator's states before each module, as far as they are known."""

    def draw(module: nn.Module) -> None:
        place = place_of.get(id(module))
        if place is None:
            return  # a container of our own
        torch.set_rng_state(states[-1])
        for earlier in modules[len(states) - 1 : place]:
            initialise(_thrown_away(earlier))
            states.append(torch.get_rng_state())
        torch.set_rng_state(states[place])
        initialise(module)
        if place + 1 == len(states):
            states.append(torch.get_rng_state())

    return draw


def _thrown_away(module: nn.Module) -> nn.Module:
    """Returns ``module`` with memory of its own for the parameters that it has itself."""
    twin = copy.copy(module)
    twin._parameters = {name: None if p is None else _like(p) for name, p in module._parameters.items()}
    return twin


def _like(parameter: nn.Parameter) -> nn.Parameter:
    memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    return nn.Parameter(memory, requires_grad=parameter.requires_grad)
