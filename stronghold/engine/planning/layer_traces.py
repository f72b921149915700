"""What layers were found to compute and to take, kept for all the computations that run layers like them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stronghold.engine.planning.fakes import Fakes


@dataclass(frozen=True)
class LayerTraces:
    """Kept traces, by what a layer has in common with those that compute the same, and what it is called with.

    ``outputs``, each with what is passed on beside it, are tensors without memory of ``mode``, in which every
    computation that is given these traces runs.
    """

    mode: Fakes = field(default_factory=Fakes)
    outputs: dict[Hashable, Any] = field(default_factory=dict)
    runs: dict[Hashable, Any] = field(default_factory=dict)
    passes: dict[Hashable, Any] = field(default_factory=dict)


def likeness(module: nn.Module) -> Hashable:
    """Returns what layers have in common that compute the same.

    Names and numbers that they keep, such as their own place, may differ, and switches may not: by one of these some
    layers pass keys and values on.
    """
    switches = [(name, value) for m in module.modules() for name, value in vars(m).items() if type(value) is bool]
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    return type(module), repr(module), tuple(parameters), tuple(switches)


def call_of(args: Any, kwargs: Any) -> Hashable:
    """Returns what calls of a layer have in common in which it computes the same.

    These are the places, shapes and types of tensors, which of them get gradients or are the same one, and all other
    values. A call with an object that may hold more is like no other.
    """
    leaves, spec = tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    found: list[Hashable] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            same = first.setdefault(id(leaf), place)
            found.append((same, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif leaf is None or type(leaf) in (bool, int, float, str):
            found.append((type(leaf), leaf))
        else:
            return object()
    return str(spec), tuple(found)
