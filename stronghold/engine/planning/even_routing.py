"""Mixtures of experts on tensors without values: each expert gets as many rows, for what a router says is a value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.experts_part import ExpertsPart, are_experts
from stronghold.engine.split_experts import bounds_of


@contextmanager
def routed_evenly(module: nn.Module) -> Iterator[None]:
    """Has the stacked experts within ``module`` each compute as many rows as the others.

    Of transformers' classes, which say of their weights how they lie; others run as they are.
    """
    in_parts = {m.experts for m in module.modules() if isinstance(m, ExpertsPart)}  # of one expert, too
    experts = [m for m in module.modules() if (m in in_parts or are_experts(m)) and hasattr(m, "is_transposed")]
    own = [m.__dict__.get("forward") for m in experts]
    try:
        for one in experts:
            one.forward = partial(_forward, one)  # type: ignore[method-assign]
        yield
    finally:
        for one, forward in zip(experts, own, strict=True):
            if forward is None:
                del one.__dict__["forward"]
            else:
                one.forward = forward  # type: ignore[method-assign]


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes as the eager implementation of transformers does, expert by expert."""
    choices = top_k_index.shape[1]
    total = torch.zeros_like(hidden_states)
    _, pairs = torch.sort(top_k_index.reshape(-1))
    bounds = bounds_of(pairs, range(experts.num_experts + 1), experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    for expert in range(experts.num_experts):
        its = pairs[bounds[expert] : bounds[expert + 1]]
        if not len(its):
            continue
        token = its // choices
        rows = _linear(experts, name, expert, hidden_states[token])
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = _linear(experts, "down_proj", expert, rows)
        if getattr(experts, "has_post_expert_norm", False):
            rows = experts.post_expert_norm(rows)
        rows = rows * top_k_weights.reshape(-1)[its][:, None]
        total.index_add_(0, token, rows.to(total.dtype))
    return total


def _linear(experts: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    rows = rows @ weight if experts.is_transposed else nn.functional.linear(rows, weight)
    return rows + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else rows
