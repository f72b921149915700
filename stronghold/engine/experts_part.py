"""Stacked experts, and some of them as a module of their own."""

from __future__ import annotations

import copy
import inspect
from typing import TypeGuard

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError

COUNT = "num_experts"
"""The attribute in which a module with stacked experts has their number."""
WRAPPED = "base_layer"
"""The name under which adapters of PEFT hold what they are around."""
NO_ADAPTERS = (
    "experts in parts have no adapters of their own (got a {} around the {}): their names would be a part's, and no "
    "whole model could load them; name other layers by target_modules=, such as the attention's, or do not split the "
    "experts"
)


def are_experts(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether a module has experts stacked in its parameters, and is called with tokens, their experts and weights."""
    count = getattr(module, COUNT, None)
    if module is None or not isinstance(count, int) or count < 2 or not module._parameters:
        return False
    stacked = all(p.ndim and p.shape[0] == count for p in module.parameters())
    # What its children have, or buffers, would not be cut.
    others = any(child._parameters for child in module.modules() if child is not module)
    others = others or any(b.ndim and b.shape[0] == count for b in module.buffers())
    return stacked and not others and len(inspect.signature(module.forward).parameters) >= 3


def adds_up_in_order(experts: nn.Module) -> bool:
    """Whether experts add up one after another, as transformers' "eager" ones; the others add up each token's own.

    Whichever is chosen, a class that transformers has not wrapped computes as it is written.
    """
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return chosen in (None, "eager") or not hasattr(type(experts).forward, "__wrapped__")


class ExpertsPart(nn.Module):
    """Some of a layer's experts: a unit of its own."""

    has_samples = False
    """The first dimension of its input is not the batch."""

    def __init__(self, experts: nn.Module, begin: int, end: int, *, copies: bool = True) -> None:
        super().__init__()
        self.experts = _some(experts, begin, end, copies)
        self._kind = type(experts)

    def forward(self, rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns what the experts make of ``rows``, times ``weights``.

        Of ``rows`` (pairs, hidden) each goes to one expert, ``numbers`` (pairs,) from this part's first on, and
        ``weights`` (pairs,) in the type of the router's.
        """
        self.check()
        if not len(rows):
            # Zeros for gradients, as the whole tensor's have where no token came.
            parameters = [p.flatten(1) for p in self.experts.parameters() if p.requires_grad]
            nothing = [nn.functional.linear(p.new_zeros(0, p.shape[1]), p).sum() for p in parameters]
            return sum(nothing, rows * weights[:, None])
        if adds_up_in_order(self.experts):  # each expert's output times its weights, in the type that they make
            output: Tensor = self.experts(rows, numbers[:, None], weights[:, None])
            return output
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        output = self.experts(rows, numbers[:, None], ones)
        return output * weights[:, None]

    def check(self) -> None:
        """Raises OffloadedModelError where something was put around the experts."""
        if type(self.experts) is not self._kind:
            around = type(self.experts).__name__
            raise OffloadedModelError(NO_ADAPTERS.format(around, f"{self._kind.__name__} of a part"))


def _some(experts: nn.Module, begin: int, end: int, copies: bool) -> nn.Module:
    """Returns a module as ``experts``, with those from ``begin`` to ``end`` alone: copies, or the same memory."""
    part = alike(experts)
    setattr(part, COUNT, end - begin)
    for name, parameter in experts._parameters.items():
        if parameter is None:
            continue
        values = parameter.detach()[begin:end]
        some = nn.Parameter(values.clone() if copies else values, requires_grad=parameter.requires_grad)
        some.__dict__.update(parameter.__dict__)
        part._parameters[name] = some
    return part


def alike(module: nn.Module) -> nn.Module:
    """Returns a module as ``module``, whose parameters, children and hooks it has, and may lose or exchange."""
    other = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(other)[name] = copy.copy(value)
    return other
