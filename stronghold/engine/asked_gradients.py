"""Gradients that the user asks for by parameter: ``backward(inputs=…)`` and ``torch.autograd.grad(loss, parameters)``.

Autograd takes a parameter for its newest accumulator. One of a layer in the window gets another with each move to the
device or back, and those of the graph are older ones: the parameter would have no gradient, and nothing would tell. So
all accumulators of the parameter in the graph stand for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from stronghold.unit import opaque, unit_of
from stronghold.window import Parts

_by_torch: Any = getattr(torch.autograd, "_engine_run_backward", None)
"""No public way knows of ``inputs`` before autograd does: ``backward`` asks no ``__torch_function__`` about them."""


def answer_for_layers() -> None:
    """Has autograd find the gradients of layers' parameters, from now on; it is as it was for all others."""
    if _by_torch is not None:
        torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]


@opaque
def _run_backward(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    """Stands for what ``torch.autograd.backward`` and ``grad`` both call; ``args[3]`` are the inputs."""
    inputs = args[3] if len(args) > 3 else ()
    moved = [_moved(one) for one in inputs]
    wanted = {id(parameter) for parameter in moved if parameter is not None}
    if not wanted:
        return _by_torch(outputs, *args, **kwargs)
    found = _accumulators(outputs, wanted)
    edges = [
        [GradientEdge(node, 0) for node in found.get(id(parameter), ())] or [one]  # torch tells of what is not used
        for one, parameter in zip(inputs, moved, strict=True)
    ]
    args = (*args[:3], tuple(edge for one in edges for edge in one), *args[4:])
    if kwargs.get("accumulate_grad"):
        return _by_torch(outputs, *args, **kwargs)
    parts: set[Parts] = {unit_of(parameter).owner.gradients.parts for parameter in moved if parameter is not None}  # type: ignore[union-attr]
    for one in parts:
        one.returned = True
    try:
        gradients = _by_torch(outputs, *args, **kwargs)
    finally:
        for one in parts:
            one.returned = False
    left = iter(gradients)
    return tuple(
        _sum(parameter, [next(left) for _ in one]) if parameter is not None else next(left)
        for parameter, one in zip(moved, edges, strict=True)
    )


def _moved(one: Tensor | GradientEdge) -> nn.Parameter | None:
    """Returns the parameter of a layer in the window that an input is, or whose accumulator it is."""
    parameter = getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one
    if not isinstance(parameter, nn.Parameter) or "_unit_reference" not in parameter.__dict__:
        return None
    unit = unit_of(parameter)
    moves = unit is not None and unit.owner is not None and unit.layer is not None and not unit.resident
    return parameter if moves else None


def _accumulators(outputs: Sequence[Tensor | GradientEdge], wanted: Collection[int]) -> dict[int, list[Node]]:
    """Returns the accumulators, in the graph of ``outputs``, of the parameters ``wanted``, by the parameter's id."""
    roots = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    waiting = [node for node in roots if node is not None]
    seen, found = set(waiting), dict[int, list[Node]]()
    while waiting:
        node = waiting.pop()
        if id(variable := getattr(node, "variable", None)) in wanted:
            found.setdefault(id(variable), []).append(node)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return found


def _sum(parameter: nn.Parameter, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Returns what the accumulators of a parameter got together, where the parameter is."""
    there = [gradient.to(parameter.device) for gradient in gradients if gradient is not None]
    if not there:
        return None
    return there[0] if len(there) == 1 else torch.stack(there).sum(0)
