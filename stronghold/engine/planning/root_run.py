"""What is computed outside the layers, with stubs in their places, and what is alive as gradients come to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from stronghold.engine.planning.recording import Recording
from stronghold.planner.op_costs import Op


@dataclass
class RootRun:
    """What is computed outside the layers over a whole batch.

    ``used_first`` are the ids of the parameters that are used before the layers. ``forward_peak_bytes`` is the most
    that is alive until the backward pass comes to the first layer, ``live_bytes`` what is when it comes to each, by the
    layer's number, and ``end_peak_bytes`` the most from the first one on. All of them count the layers' inputs and
    outputs, as checkpoints of all layers keep them, and gradients of root parameters from when they are there; what
    layers take beside comes on top.
    """

    before: Counter[Op] = field(default_factory=Counter)
    behind: Counter[Op] = field(default_factory=Counter)
    behind_backward: Counter[Op] = field(default_factory=Counter)
    before_backward: Counter[Op] = field(default_factory=Counter)
    used_first: set[int] = field(default_factory=set)
    forward_peak_bytes: int = 0
    live_bytes: dict[int, int] = field(default_factory=dict)
    end_peak_bytes: int = 0


class Layers(Protocol):
    """Who knows what a layer returns, without running each."""

    def output_of(self, number: int, inputs: Sequence[Tensor], args: tuple, kwargs: dict, forward: Any) -> Any: ...


class Stubs:
    """Stand for the layers while the rest of the model runs, which ``recording`` records for ``root``."""

    def __init__(self, layers: Layers, recording: Recording, root: RootRun) -> None:
        self._layers, self._recording, self._root = layers, recording, root
        self._begun = False
        self._expected = 0  # backward passes of layers
        self._ended = 0

    @contextmanager
    def in_place_of(self, model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Has them stand for ``modules`` of ``model`` inside of the block."""
        handles, within = [], {id(inner) for module in modules for inner in module.modules()}
        for module in model.modules():
            ids = {id(p) for p in module._parameters.values() if p is not None}
            if ids and id(module) not in within:
                handles.append(module.register_forward_pre_hook(lambda *_, ids=ids: self._used(ids)))
        try:
            for number, module in enumerate(modules):
                module.forward = partial(self._run, number, module, module.forward)  # type: ignore[method-assign]
            yield
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)
            for handle in handles:
                handle.remove()

    def _used(self, ids: set[int]) -> None:
        if not self._begun:
            self._root.used_first |= ids

    def _run(self, number: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recording, self._begun = self._recording, True
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        recording.go_on(self._root.behind)
        with recording.paused():
            like = self._layers.output_of(number, given, args, kwargs, forward)
            if not any(t.requires_grad for t in given) and any(p.requires_grad for p in module.parameters()):
                given.append(torch.empty(0, requires_grad=True))  # stands for the layer's parameters
        self._expected += any(t.requires_grad for t in given)
        leaves, spec = tree_flatten(like)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        with recording.uncounted():
            outputs = _Skipped.apply(self, number, [leaves[n] for n in places], *given)
        for place, output in zip(places, outputs, strict=True):
            leaves[place] = output
        return tree_unflatten(leaves, spec)

    def backward(self, number: int) -> None:
        """Called when the backward pass of a layer would begin."""
        root, recording = self._root, self._recording
        if not self._ended:
            root.forward_peak_bytes = recording.peak_bytes
            recording.begin(recording.ops)
        self._ended += 1
        root.live_bytes[number] = max(root.live_bytes.get(number, 0), recording.live_bytes)
        recording.go_on(root.before_backward if self._ended == self._expected else root.behind_backward)

    def end(self) -> None:
        """Called when the backward pass is over."""
        peak = self._recording.peak_bytes
        self._root.end_peak_bytes = peak
        if not self._ended:  # no gradient came to a layer
            self._root.forward_peak_bytes = peak


class _Skipped(torch.autograd.Function):
    """A layer that is not computed, and keeps what a checkpoint would."""

    @staticmethod
    def forward(ctx: Any, stubs: Stubs, number: int, like: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.stubs, ctx.number = stubs, number
        ctx.save_for_backward(*given)
        return tuple(torch.empty(t.shape, dtype=t.dtype) for t in like)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        ctx.stubs.backward(ctx.number)
        with ctx.stubs._recording.uncounted():
            gradients = (torch.empty_like(t) if t.requires_grad else None for t in ctx.saved_tensors)
            return None, None, None, *gradients


@contextmanager
def dropped(parameters: Sequence[Tensor], first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Gives up each gradient as soon as it is there; calls ``first`` at the first one."""
    seen = False

    def drop(parameter: Tensor) -> None:
        nonlocal seen
        parameter.grad = None
        if not seen:
            seen = True
            first()

    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
