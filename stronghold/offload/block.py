"""Runs one layer through the window, in the forward pass and again in the backward pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stronghold.errors import OffloadedModelError
from stronghold.home import Home
from stronghold.offload.microbatch import join, split
from stronghold.offload.replay import Buffers, Hooks, structural_copy
from stronghold.window import HostActivations, Window


class Run:
    """One run of a layer in a forward pass; it lives as long as autograd may come back to it."""

    def __init__(self, layer: int) -> None:
        self.layer = layer


@dataclass(frozen=True)
class _Place:
    """Stands for the tensor of this number in an argument list."""

    number: int


@dataclass(frozen=True)
class _SlotTensor:
    """Stands for a saved tensor that lies in a slot: fetched again rather than kept."""

    run: Run
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Runner(Protocol):
    """What a block needs of the engine."""

    window: Window
    activations: HostActivations | None
    keep: bool
    micro_batch: int | None

    def enter(self, block: Block) -> list[int]:
        """Hears that a forward computation begins; returns the layers that a backward pass would compute again."""

    def ran(self, run: Run) -> None:
        """Hears that a backward pass may come back to ``run``."""

    def return_to(self, run: Run) -> None:
        """Opens the backward pass of the layer of ``run``, where it is not open."""


class Block:
    """A layer whose ``forward`` passes through the window.

    In training, ``"recompute"`` and ``"host"`` run the layer again in the backward pass by non-reentrant
    ``torch.utils.checkpoint``, which restores random states and autocast; ``"keep"`` lets autograd keep what it saves,
    except what lies in a slot, which is fetched again when it is asked for.
    """

    def __init__(self, module: nn.Module, home: Home, engine: Runner) -> None:
        assert home.index is not None
        self.module = module
        self.home = home
        self.layer = home.index
        self.engine = engine
        self._forward: Callable[..., Any] = module.forward
        self._modules = list(module.modules())
        placed = {id(parameter) for parameter in home.parameters}
        owners = ((m, name, p) for m in self._modules for name, p in m._parameters.items())
        self._owners = [(m, name, p) for m, name, p in owners if p is not None and id(p) in placed]
        self._extent = self._measure()
        self._has_buffers = any(True for _ in module.buffers())

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine, training = self.engine, torch.is_grad_enabled()
        behind = engine.enter(self)
        engine.window.begin_forward(self.layer, training=training, behind=behind)
        run, returning = Run(self.layer), False
        try:
            output = self._pieces(run, args, kwargs) if training else self._bare(*args, **kwargs)
            returning = training and _requires_grad(output)
        finally:
            engine.window.end_forward(self.layer, returning=returning)
        if returning:
            engine.ran(run)
        return output

    def check(self) -> None:
        """Raises OffloadedModelError where parameters were added or replaced since ``offload``."""
        self.home.check_unchanged(self._owners)
        if self._measure() != self._extent:
            raise OffloadedModelError(
                f"{self.home.name} ({type(self.module).__name__}) has other modules or parameters than at offload() "
                f"(modules and parameters then: {self._extent}, now: {self._measure()}); add them before offload()"
            )

    def _measure(self) -> tuple[int, int]:
        return sum(len(m._modules) for m in self._modules), sum(len(m._parameters) for m in self._modules)

    def _bare(self, *args: Any, **kwargs: Any) -> Any:
        # Autocast caches the casts of weights by their identity for as long as it is active: cleared at both ends, it
        # neither keeps every layer's cast weights on the device nor makes the second run differ from the first.
        torch.clear_autocast_cache()
        try:
            return self._forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    def _pieces(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one = self._kept if self.engine.keep else self._recomputed
        if self.engine.micro_batch is None:
            return one(run, args, kwargs)
        pieces = split(args, kwargs, self.engine.micro_batch)
        outputs = [one(run, *piece) for piece in pieces]
        if len(outputs) == 1:
            return outputs[0]
        return join(outputs, [_batch(piece) for piece in pieces])

    def _kept(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = self.engine.window

        def pack(tensor: Tensor) -> Any:
            where = window.slot_of(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if where is None:
                return tensor
            offset = tensor.storage_offset() * tensor.element_size() + where[1]
            stride = [int(step) for step in tensor.stride()]
            return _SlotTensor(run, offset, tensor.dtype, tuple(tensor.shape), tuple(stride))  # type: ignore[arg-type]

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            self.engine.return_to(packed.run)
            flat = window.flat(packed.run.layer)[packed.offset :]
            usable = flat.numel() // packed.dtype.itemsize * packed.dtype.itemsize
            return torch.as_strided(flat[:usable].view(packed.dtype), packed.shape, packed.stride)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self._bare(*args, **kwargs)

    def _recomputed(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        arguments = _flatten((args, kwargs), tensors)
        buffers = Buffers(self.module) if self._has_buffers else None
        hooks = Hooks(self.module)
        # The first run gets what the caller gave, not copies: a cache must be filled, a list appended to.
        first: list[Any] = [(args, kwargs)]
        del args, kwargs

        def compute(*tensors: Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                with hooks.first():
                    output = self._bare(*args, **kwargs)
                if buffers is not None:
                    buffers.ran()
                return output
            self.engine.return_to(run)
            args, kwargs = _fill(arguments, tensors)
            with buffers.again() if buffers is not None else ExitStack(), hooks.again():
                return self._bare(*args, **kwargs)

        with ExitStack() as stack:
            if self.engine.activations is not None:
                keeper = self.engine.activations
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack))
            return checkpoint(compute, *tensors, use_reentrant=False)


def _flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Replaces the tensors in the argument containers by places; copies everything else that a run may change."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)(_flatten(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _flatten(item, tensors) for key, item in value.items()}
    return structural_copy(value)


def _fill(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if type(value) is _Place:
        return tensors[value.number]
    if type(value) in (list, tuple):
        return type(value)(_fill(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _fill(item, tensors) for key, item in value.items()}
    return structural_copy(value)


def _requires_grad(output: Any) -> bool:
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, (list, tuple)):
        return any(_requires_grad(item) for item in output)
    if isinstance(output, dict):
        return any(_requires_grad(item) for item in output.values())
    return False


def _batch(piece: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    from stronghold.offload.microbatch import batch_of

    leader = batch_of(*piece)
    assert leader is not None
    return leader.shape[0]


RunReference = weakref.ref[Run]
