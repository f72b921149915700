"""A slot's memory, which nobody may keep beyond a layer's computation: another layer's weights come there next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stronghold.engine.arguments import tensors_in
from stronghold.engine.copying import structural_copy
from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit
from stronghold.window import Window


def copied_out(output: Any, lies_in_slot: Callable[[Tensor], bool]) -> Any:
    """Returns a layer's output with copies, in autograd's graph, of the tensors that lie in its slot.

    Those are views of its weights, or the weights themselves. Without any, ``output`` itself is returned.
    """
    if not any(map(lies_in_slot, tensors_in(output))):
        return output
    return structural_copy(output, lambda tensor: tensor.clone() if lies_in_slot(tensor) else tensor)


def check_let_go(unit: Unit, window: Window, before: int) -> None:
    """Raises OffloadedModelError where more use the slot of ``unit`` than the ``before`` its computation.

    That is a tensor over its weights that a hook, an attribute or a function of autograd keeps by a way that saves it
    without autograd's knowledge: what it holds would be the weights of another layer.
    """
    assert unit.layer is not None
    if window.users(unit.layer) <= before:
        return
    gc.collect()  # an object that refers to itself lets go when it is collected
    if window.users(unit.layer) > before:
        raise OffloadedModelError(
            f"nothing may keep a tensor over the weights of {unit.name} beyond its computation, for the window puts "
            f"another layer's there next (got {_kept(unit, window)}, kept by a hook, by an attribute or in the context "
            "of an autograd function); keep a clone(), or use ctx.save_for_backward"
        )


def _kept(unit: Unit, window: Window) -> str:
    """Returns what is known of a tensor that somebody keeps: Python sees those that autograd alone has not."""
    assert unit.layer is not None
    found = window.kept_by_another(unit.layer)
    return "one that no object of Python's has" if found is None else f"one of shape {tuple(found.shape)}"
