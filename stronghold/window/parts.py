"""Gradients that come in parts: those of a layer that runs several times in one backward pass.

Autograd adds up what an accumulator receives in a pass, and fires its hooks once. But a parameter gets a new one when
its data moves to another device (``VariableHooks::set_data``), so that each run of a layer in the window has its own,
which fires for that run alone. The parts wait on the host, in the dtype in which autograd would have added them up; the
last one brings the sum, and only then do the user's hooks and the update hear of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit, opaque, set_gradient

R = TypeVar("R")


class Accumulators(Generic[R]):
    """The accumulators of one run of a layer, whose graph holds this; made while the layer is on the device.

    ``run`` is what lives as long as the graph has what autograd saved for it. Where autograd's hooks do not hold it
    this does, with ``hold``, until the backward pass has come to it.
    """

    def __init__(self, unit: Unit, run: R, *, nodes: Sequence[Node | None], hold: bool = False) -> None:
        self._nodes = nodes
        self._saved = weakref.ref(run)
        self.run = run if hold else None
        self.counted = False

    @property
    def spent(self) -> bool:
        """Whether a backward pass has come to the run and freed its graph."""
        return self.counted and self._saved() is None

    def awaited(self) -> list[Node | None]:
        """Returns, by index, the accumulators to which the backward pass under way comes."""
        return [node if node and _comes_to(node) else None for node in self._nodes]


class Parts:
    """Which gradients of the backward passes under way are parts, and what has come of them."""

    def __init__(self) -> None:
        self._runs: defaultdict[int, weakref.WeakSet[Accumulators]] = defaultdict(weakref.WeakSet)
        self._left: dict[tuple[int, int], list[int]] = {}
        """By graph task and layer, how many parts have not come, at each index."""
        self._waiting: dict[tuple[int, int], Tensor] = {}
        self._coming: set[tuple[int, int]] = set()
        """The parameters of which autograd is handing over a part that is not the last."""
        self.returned = False
        """Whether the pass under way returns the gradients of layers (``autograd.grad``), and accumulates none."""
        self.whole_layer: int | None = None
        self.whole_thread = 0
        """The layer, open in this thread's pass, of whose gradients nothing has to be known before they are there."""

    def ran(self, layer: int, accumulators: Accumulators) -> None:
        """Called when autograd has a graph of a run of ``layer``, to which a backward pass may come back."""
        self._runs[layer].add(accumulators)

    def several(self, layer: int) -> bool:
        """Whether autograd may come back to several runs of ``layer``."""
        return len(self._runs[layer]) > 1

    def opened(self, unit: Unit, *, alone: bool) -> None:
        """Called when the backward pass comes to a layer whose parameters have our own hooks ``alone``, or not."""
        assert unit.layer is not None
        counted = (torch._C._current_graph_task_id(), unit.layer) in self._left
        self.whole_layer = unit.layer if alone and not counted and not self.several(unit.layer) else None
        self.whole_thread = threading.get_ident()

    def closed(self) -> None:
        """Called when the backward pass leaves the layer that is open, if any."""
        self.whole_layer = None

    def arriving(self, unit: Unit, index: int, gradient: Tensor | None) -> Tensor | None:
        """Called with a gradient before all hooks of the user; returns what comes in its stead, or None for itself.

        It is None where a function's backward gave none.
        """
        assert unit.layer is not None
        task, key = torch._C._current_graph_task_id(), (unit.layer, index)
        counts = self._left.get((task, unit.layer))
        if counts is None:
            if not (self.several(unit.layer) or _heard_of(unit.parameters[index])):
                return None
            counts = self._left[task, unit.layer] = self._count(unit)
        left, counts[index] = counts[index], counts[index] - 1
        if left < 1 and _heard_of(unit.parameters[index]):
            raise OffloadedModelError(
                f"a hook on a parameter of {unit.name} would be called with parts of its gradient, for the loss "
                "computes with the parameter outside of its layer as well (a penalty on weights), on the host, and "
                "autograd adds these up apart; remove the hook and change p.grad when backward() has returned, or "
                "leave the term out and add its gradient there"
            )
        if left > 1:
            if self.returned:  # nothing is called behind the hooks
                self.keep(unit, index, gradient)
            self._coming.add(key)
            # Autograd returns all that it hands over, and the last one brings the sum.
            return gradient.new_zeros(()).expand_as(gradient) if self.returned and gradient is not None else None
        self._coming.discard(key)
        before = self._waiting.pop(key, None) if left == 1 else None
        if before is None:
            return None
        if gradient is not None:
            return before.to(gradient.device) + gradient
        parameter = unit.parameters[index]
        if self.returned or len(parameter._backward_hooks or ()) > 1:  # no hook may give something for None
            raise OffloadedModelError(
                f"{unit.name} runs several times in one backward pass, and the last of its runs gave None for the "
                "gradient of a parameter with a hook, which is to hear of the sum, or for one that torch.autograd.grad "
                "returns; return zeros instead of None, or use register_post_accumulate_grad_hook and backward()"
            )
        set_gradient(parameter, before.to(parameter.device))
        return None

    def _count(self, unit: Unit) -> list[int]:
        """Returns, by index, to how many accumulators the backward pass under way comes."""
        assert unit.layer is not None
        awaited: list[set[Node]] = [set() for _ in unit.parameters]
        for run in list(self._runs[unit.layer]):
            nodes = run.awaited()
            for known, node in zip(awaited, nodes, strict=True):
                if node is not None:
                    known.add(node)
            if any(nodes):
                run.counted = True
            elif run.spent:  # of a loss that the user has kept
                self._runs[unit.layer].discard(run)
        return [max(1, len(known)) for known in awaited]

    def is_part(self, key: tuple[int, int]) -> bool:
        """Whether what autograd hands over for the parameter at this layer and index is a part, and not the last."""
        return key in self._coming

    def keep(self, unit: Unit, index: int, gradient: Tensor | None) -> None:
        """Keeps a part, if there is one, until the last one comes."""
        assert unit.layer is not None
        key = (unit.layer, index)
        self._coming.discard(key)
        if gradient is None:
            return
        before = self._waiting.get(key)
        whole = gradient if before is None else before.to(gradient.device) + gradient
        self._waiting[key] = torch.empty_like(whole, device="cpu").copy_(whole)

    def forget(self) -> None:
        """Forgets a backward pass; of one that failed also the parts, as autograd forgets what it had added up."""
        self._left.clear()
        self._waiting.clear()
        self._coming.clear()


class OfSums:
    """A hook of the user's on a parameter of a layer, called with whole gradients alone, and ``before`` it.

    It takes the hook's place among the parameter's, under its number, so that the user's handle still removes it.
    """

    def __init__(
        self, hook: Callable[[Any], Any], parts: Parts, key: tuple[int, int], before: Callable[[Any], None] | None
    ) -> None:
        self._hook, self._parts, self._key, self._before = hook, parts, key, before

    @opaque
    def __call__(self, value: Tensor | nn.Parameter) -> Any:
        if self._parts.is_part(self._key):
            return None
        if self._before is not None:
            self._before(value)
        return self._hook(value)


def _heard_of(parameter: nn.Parameter) -> bool:
    """Whether a parameter of a layer has hooks of the user's, beside our own."""
    return len(parameter._backward_hooks or ()) > 1 or len(parameter._post_accumulate_grad_hooks or ()) > 1


def _comes_to(node: Node) -> bool:
    """Whether the backward pass under way comes to an accumulator."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it does, but to return the gradient: "we are currently running autograd.grad()"
        return True


def accumulators_of(unit: Unit) -> list[Node | None]:
    """Returns what adds up the gradient of each parameter of a layer where it is now; None for one without."""
    # Held, for before torch 2.13 its node knows its inputs only while it lives.
    output = _Together.apply(*unit.parameters)
    together: Node | None = output.grad_fn
    # None where no parameter is trained now: one that is trained later has no part of this run.
    return [node for node, _ in together.next_functions] if together else [None] * len(unit.parameters)


class _Together(torch.autograd.Function):
    """Has all parameters of a layer as inputs, which is the cheapest way to all of their accumulators."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("nobody computes with its output")
