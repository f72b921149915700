"""State dictionaries that a thread takes while another computes: no value in them lies in the window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.block import block_of
from stronghold.errors import OffloadedModelError


def off_the_window(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Takes a layer's values again, once it has computed, where they lie in a slot: another layer's come there next.

    PyTorch calls it behind the ``state_dict()`` of a layer. Raises OffloadedModelError where the layer's own
    computation asked for it, and in a backward pass of another thread's.
    """
    if (block := block_of(module)) is None or block.engine.closed:  # a copy is an ordinary layer
        return
    engine = block.engine

    def in_a_slot(value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):  # a parameter goes back by itself
            return False
        if hasattr(value, "__tensor_flatten__"):
            return any(in_a_slot(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return engine.window.holds(value)

    there = [name for name, value in state_dict.items() if name.startswith(prefix) and in_a_slot(value)]
    if not there:
        return
    for name in there:
        state_dict[name] = None  # the thread that computes is not to find anybody who keeps them
    with engine.turns.taken():
        if torch._C._current_graph_task_id() == -1:
            engine.close_backward()  # one that an error has ended left its layer in the slot
        if engine.window.is_bound(block.layer):
            raise OffloadedModelError(
                "a state_dict() needs weights that stay where they are, and those of a layer that computes do not (got "
                f"one of {block.unit.name} within its own computation); call it before or behind the model's forward"
            )
        state_dict.update({name: value for name, value in module.state_dict(prefix=prefix).items() if name in there})
