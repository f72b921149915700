"""What is computed outside the layers, with stubs in their places, and what is alive as gradients come to each."""

from __future__ import annotations

import weakref
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


@dataclass(frozen=True)
class Released:
    """What nobody else has of a layer's inputs that get gradients, and of its output's gradients.

    By their places among all tensors that it is given, and that it returns.
    """

    inputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()

    def __and__(self, other: Released) -> Released:
        return Released(self.inputs & other.inputs, self.gradients & other.gradients)


NOTHING = Released()


@dataclass
class RootRun:
    """What is computed outside the layers over a whole batch.

    ``used_first`` are the ids of the parameters that are used before the layers. Bytes are by the number of the layer:
    what is alive as its forward and its backward pass begin (``given_bytes``, ``live_bytes``), the most that is alive
    from the layer before to this one (``before_bytes``), and from its backward pass to the next (``after_bytes``).
    ``behind_bytes`` is the most from the last layer's forward pass to the first backward pass of one. All of them count
    the layers' inputs and outputs, as checkpoints of all layers keep them, and gradients of root parameters from when
    they are there; what layers take beside comes on top.

    ``released`` is what the layer alone has as its backward pass begins; of ``dropped`` layers the output is not kept
    outside them until the backward pass.
    """

    before: Counter[Op] = field(default_factory=Counter)
    behind: Counter[Op] = field(default_factory=Counter)
    behind_backward: Counter[Op] = field(default_factory=Counter)
    before_backward: Counter[Op] = field(default_factory=Counter)
    used_first: set[int] = field(default_factory=set)
    before_bytes: dict[int, int] = field(default_factory=dict)
    given_bytes: dict[int, int] = field(default_factory=dict)
    behind_bytes: int = 0
    live_bytes: dict[int, int] = field(default_factory=dict)
    after_bytes: dict[int, int] = field(default_factory=dict)
    released: dict[int, Released] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)


class Layers(Protocol):
    """Who knows what a layer returns, without running each."""

    def output_of(self, number: int, inputs: Sequence[Tensor], args: tuple, kwargs: dict, forward: Any) -> Any: ...


class Stubs:
    """Stand for the layers while the rest of the model runs, which ``recording`` records for ``root``."""

    def __init__(self, layers: Layers, recording: Recording, root: RootRun) -> None:
        self._layers, self._recording, self._root = layers, recording, root
        self._begun = False
        self._expected = 0  # backward passes of layers
        self._ended: list[_Ended] = []

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
        recording, root, self._begun = self._recording, self._root, True
        _raise_to(root.before_bytes, number, recording.peak_bytes)
        _raise_to(root.given_bytes, number, recording.live_bytes)
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        recording.begin(root.behind)
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
            weakref.finalize(output.untyped_storage(), self._gone, number).atexit = False
        return tree_unflatten(leaves, spec)

    def _gone(self, number: int) -> None:
        if not self._ended:
            self._root.dropped.add(number)

    def backward(self, number: int, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Called when the backward pass of a layer would begin; returns gradients of ``inputs``."""
        root, recording = self._root, self._recording
        self._end_segment()
        _raise_to(root.live_bytes, number, recording.live_bytes)
        with recording.uncounted():  # the layer's passes say what is alive meanwhile
            found = [torch.empty_like(t) if t.requires_grad else None for t in inputs]
        ended = _Ended(number, recording)
        self._ended.append(ended)
        for kind, tensors in ((ended.inputs, inputs), (ended.gradients, gradients)):
            for place, tensor in enumerate(tensors):
                if kind is ended.gradients or tensor.requires_grad:
                    weakref.finalize(tensor.untyped_storage(), ended.gone, kind, place).atexit = False
        recording.begin(root.before_backward if len(self._ended) == self._expected else root.behind_backward)
        recording.peak_bytes = 0
        return found

    def _end_segment(self) -> None:
        if self._ended:
            _raise_to(self._root.after_bytes, self._ended[-1].number, self._recording.peak_bytes)
        else:
            self._root.behind_bytes = self._recording.peak_bytes

    def end(self) -> None:
        """Called when the backward pass is over."""
        self._end_segment()
        for ended in self._ended:
            one, known = Released(frozenset(ended.inputs), frozenset(ended.gradients)), self._root.released
            known[ended.number] = one & known.get(ended.number, one)


class _Ended:
    """A layer whose backward pass is over: notes what is given up before anything else is computed."""

    def __init__(self, number: int, recording: Recording) -> None:
        self.number, self._recording = number, recording
        self._computed = recording.computed
        self.inputs: set[int] = set()
        self.gradients: set[int] = set()

    def gone(self, kind: set[int], place: int) -> None:
        if self._recording.computed == self._computed:
            kind.add(place)


def _raise_to(known: dict[int, int], number: int, value: int) -> None:
    known[number] = max(known.get(number, 0), value)


class _Skipped(torch.autograd.Function):
    """A layer that is not computed, and keeps what a checkpoint would."""

    @staticmethod
    def forward(ctx: Any, stubs: Stubs, number: int, like: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.stubs, ctx.number = stubs, number
        ctx.save_for_backward(*given)
        return tuple(torch.empty(t.shape, dtype=t.dtype) for t in like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.stubs.backward(ctx.number, ctx.saved_tensors, gradients)


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
