"""Runs one layer through the window, in the forward pass and again in the backward pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from stronghold.device import Device
from stronghold.errors import OffloadedModelError
from stronghold.home import Home
from stronghold.offload.microbatch import batch_of, join, split
from stronghold.offload.replay import Hooks, State, structural_copy
from stronghold.window import HostActivations, Window


class Run:
    """One run of a layer in a forward pass; it lives as long as autograd may come back to it."""

    def __init__(self, layer: int, generation: int) -> None:
        self.layer = layer
        self.generation = generation


@dataclass(frozen=True)
class _Place:
    """Stands for the tensor of this number in an argument list."""

    number: int


class _SlotTensor(NamedTuple):
    """Stands for a saved tensor that lies in a slot, ``offset`` elements behind its beginning: fetched again."""

    run: Run
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Members:
    """The modules in a part of the model, and how many parameters each has, to notice when that changes."""

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        self._name = name
        self._before = [(m, [id(child) for child in m._modules.values()], len(m._parameters)) for m in modules]

    def check(self) -> None:
        """Raises OffloadedModelError where modules or parameters were added, removed or replaced."""
        for module, children, count in self._before:
            now, parameters = module._modules, len(module._parameters)
            if parameters != count or [id(child) for child in now.values()] != children:
                raise OffloadedModelError(
                    f"{type(module).__name__} in {self._name} has other modules or parameters than at offload() "
                    f"({len(children)} modules and {count} parameters then, {len(now)} and {parameters} now), and "
                    "what is new would be left out; add or replace modules before offload()"
                )


class Runner(Protocol):
    """What a block needs of the engine."""

    device: Device
    window: Window
    activations: HostActivations | None
    micro_batch: int | None

    def enter(self, block: Block) -> list[int]:
        """Hears that a forward computation begins; returns the layers that a backward pass would compute again."""

    def ran(self, run: Run) -> None:
        """Hears that a backward pass may come back to ``run``."""

    def return_to(self, run: Run) -> None:
        """Opens the backward pass of the layer of ``run``, where it is not open."""


class Block:
    """A layer whose ``forward`` passes through the window.

    In training the layer runs again in the backward pass by non-reentrant ``torch.utils.checkpoint``, which restores
    random states and autocast; with ``keep`` autograd keeps what it saves, except what lies in a slot, which is fetched
    again when it is asked for.
    """

    def __init__(self, module: nn.Module, home: Home, engine: Runner, *, keep: bool) -> None:
        assert home.index is not None
        self.module = module
        self.home = home
        self.layer = home.index
        self.engine = engine
        self.keep = keep
        self._device_type = engine.device.torch_device.type
        self._forward: Callable[..., Any] = module.forward
        placed = {id(parameter) for parameter in home.parameters}
        owners = ((m, name, p) for m in module.modules() for name, p in m._parameters.items())
        self._owners = [(m, name, p) for m, name, p in owners if p is not None and id(p) in placed]
        self._members = Members(home.name, module.modules())

        module.forward = _Forward(self, self._forward)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine, training = self.engine, torch.is_grad_enabled()
        behind = engine.enter(self)
        engine.window.begin_forward(self.layer, training=training, behind=behind)
        run, nodes, returning = Run(self.layer, self.home.generation), set(), False
        try:
            output = self._pieces(run, args, kwargs) if training else self._bare(*args, **kwargs)
            nodes = _nodes(output) if training else set()
            returning = bool(nodes)
        finally:
            engine.window.end_forward(self.layer, returning=returning)
        if returning:
            engine.ran(run)
            for node in nodes:
                node.register_prehook(self._refuse_graph)
        return output

    def check(self) -> None:
        """Raises OffloadedModelError where parameters were added or replaced since ``offload``."""
        self.home.check_unchanged(self._owners)
        self._members.check()

    def _refuse_graph(self, gradients: tuple[Tensor | None, ...]) -> None:
        if torch.is_grad_enabled():
            raise OffloadedModelError(
                "create_graph=True keeps the graph of a backward pass, and with it weights on the device that the "
                f"window takes back (got it in {self.home.name}); compute second derivatives on a model that is not "
                "offloaded"
            )

    def _bare(self, *args: Any, **kwargs: Any) -> Any:
        # Autocast caches the casts of weights by their identity for as long as it is active: cleared at both ends, it
        # neither keeps every layer's cast weights on the device nor makes the second run differ from the first.
        if not torch.is_autocast_enabled(self._device_type):
            return self._forward(*args, **kwargs)
        torch.clear_autocast_cache()
        try:
            return self._forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    def _pieces(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one = self._kept if self.keep else self._recomputed
        if self.engine.micro_batch is None:
            return one(run, args, kwargs)
        pieces = split(args, kwargs, self.engine.micro_batch)
        outputs = [one(run, *piece) for piece in pieces]
        if len(outputs) == 1:
            return outputs[0]
        leaders = [leader.shape for piece in pieces if (leader := batch_of(*piece)) is not None]
        return join(outputs, leaders)

    def _kept(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = self.engine.window

        def pack(tensor: Tensor) -> Any:
            where = window.slot_of(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if where is None:
                return tensor
            offset = int(tensor.storage_offset()) + where[1] // tensor.element_size()
            return _SlotTensor(run, tensor.dtype, offset, tensor.shape, tensor.stride())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            self.engine.return_to(packed.run)
            return window.part(packed.run.layer, *packed[1:])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self._bare(*args, **kwargs)

    def _recomputed(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        arguments = _flatten((args, kwargs), tensors)
        state, hooks = State(self.module), Hooks(self.module)
        # The first run gets what the caller gave, not copies: a cache must be filled, a list appended to.
        first: list[Any] = [(args, kwargs)]
        del args, kwargs

        def compute(*tensors: Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                with hooks.first():
                    output = self._bare(*args, **kwargs)
                state.ran()
                return output
            self.engine.return_to(run)
            args, kwargs = _fill(arguments, tensors)
            with state.again(), hooks.again():
                return self._bare(*args, **kwargs)

        with ExitStack() as stack:
            if self.engine.activations is not None:
                stack.enter_context(self.engine.activations.inputs())
            return checkpoint(compute, *tensors, use_reentrant=False)


class _Forward:
    """Stands for the ``forward`` of a layer; a copy of the layer, in memory or in a file, gets its own back."""

    def __init__(self, block: Block, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self._block = block
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._block(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable[..., Any]:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._own.__reduce_ex__(protocol)


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


def _nodes(output: Any) -> set[Node]:
    """Returns where the backward pass enters the layer, as far as its output shows."""
    if isinstance(output, Tensor):
        return set() if output.grad_fn is None else {output.grad_fn}
    if isinstance(output, (list, tuple)):
        return {node for item in output for node in _nodes(item)}
    if isinstance(output, dict):
        return {node for item in output.values() for node in _nodes(item)}
    return set()
