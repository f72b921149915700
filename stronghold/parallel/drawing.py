"""Initialising a part of a model as it would be initialised within the whole."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from stronghold.errors import ParallelError

Initialise = Callable[[nn.Module], object]


def in_order(model: nn.Module, initialise: Initialise) -> Initialise:
    """Returns ``initialise`` for those modules of ``model`` that this process has.

    It draws, and throws away, what the other modules draw, in the order of ``nn.Module.apply``: so each parameter gets
    the values that it has in one process from the same seed. One module's parameters are in memory at a time.
    """
    visited: list[nn.Module] = []
    model.apply(visited.append)
    known = {id(module): module for module in visited}
    pending = deque(known.values())

    def draw(module: nn.Module) -> None:
        if id(module) not in known:
            return  # a container of our own
        while pending and pending[0] is not module:
            initialise(_thrown_away(pending.popleft()))
        if not pending:
            raise ParallelError(
                f"the modules of a model are initialised in their order in it (got {type(module).__name__} after a "
                "later one); build the model's modules in the order in which they are computed"
            )
        initialise(pending.popleft())

    return draw


def _thrown_away(module: nn.Module) -> nn.Module:
    """Returns ``module`` with memory of its own for the parameters that it has itself."""
    twin = copy.copy(module)
    twin._parameters = {
        name: p if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    return twin
