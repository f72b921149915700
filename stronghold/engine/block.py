"""Runs one layer through the window, in the forward pass and again in the backward pass."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import Node

from stronghold.device import Device
from stronghold.engine.arguments import fill, flatten, nodes_of
from stronghold.engine.checkpointed import SecondRuns, checkpointed
from stronghold.engine.compiled import Compiling, is_compile_error, refuse_saved
from stronghold.engine.compiler_settings import CompilerSettings
from stronghold.engine.copying import GeneratorCopies
from stronghold.engine.dispatch_modes import outside_modes
from stronghold.engine.forward_hooks import ForwardHooks
from stronghold.engine.members import Members, check_held
from stronghold.engine.microbatch import MicroBatches, batch_of
from stronghold.engine.module_writes import ModuleWrites
from stronghold.engine.packing import Fetches, Run, pack, pack_input, pack_on_host, there, unpack, unpack_input
from stronghold.engine.parametrized import ParametrizationCache
from stronghold.engine.places import ModulePlaces
from stronghold.engine.recorded import Recorded
from stronghold.engine.replay import State, requiring_grad
from stronghold.engine.saved import stale_error
from stronghold.engine.slot_memory import check_let_go, copied_out
from stronghold.engine.stale import is_stale
from stronghold.engine.turns import Turns
from stronghold.errors import OffloadedModelError
from stronghold.unit import (
    Unit,
    as_written,
    bound,
    check_mixed,
    check_not_swapped,
    check_not_traced,
    check_not_transformed,
    opaque,
    unit_of,
)
from stronghold.window import Accumulators, KeptInput, accumulators_of

_next_node = torch.autograd._get_sequence_nr
"""Returns the number of the node that autograd makes next in this thread."""


class Runner(Fetches, Protocol):
    """What a block needs of the engine."""

    device: Device
    micro_batch: int | None
    turns: Turns
    compiling: Compiling
    second_runs: SecondRuns

    def enter(self, block: Block) -> list[int]:
        """Called when a forward computation begins; returns the layers that a backward pass would compute again."""

    def ran(self, run: Run, accumulators: Accumulators[Run]) -> None:
        """Called when autograd has a graph of ``run``, to which a backward pass may come back."""

    def updates_in_backward(self) -> bool:
        """Whether layers are updated during a backward pass."""

    def begin_backward(self) -> None:
        """Called when a backward pass comes to a layer, before any that is within that one."""

    def refuse_changes(self) -> None:
        """Takes in what was added to the model, and raises OffloadedModelError for any other change of it."""


class Block:
    """A layer whose ``forward`` passes through the window.

    In training the layer runs again in the backward pass (:func:`checkpointed`), which restores random states and
    autocast; with ``keep`` autograd keeps what it saves, except what lies in a slot, which is fetched again when it is
    asked for. Of a resident layer nothing is, and autograd keeps all by itself. What is trained of a layer may lie
    ``beside`` it, in units of the root.

    The layer holds its block. Neither the block nor autograd's graph holds the layer: a module may keep a graph in an
    attribute, and the garbage collector does not see the way through one.
    """

    def __init__(
        self, module: nn.Module, unit: Unit, engine: Runner, *, keep: bool, beside: Sequence[Unit] = ()
    ) -> None:
        assert unit.layer is not None
        self._module = weakref.ref(module)
        self.unit = unit
        self._beside = [*beside]
        self.layer = unit.layer
        self.engine = engine
        self.keep = keep
        self._device_type = engine.device.torch_device.type
        own = module.forward
        self._is_method = getattr(own, "__self__", None) is module
        self._own: Callable[..., Any] = own.__func__ if self._is_method else own  # type: ignore[attr-defined]
        self._is_of_class = self._own is type(module).forward
        self._owner = weakref.ref(self)
        self._enter_backward = functools.partial(_enter_backward, self._owner, unit.name)
        self._look_at(module)
        self.compiled = engine.compiling.layer(module, self._own, is_method=self._is_method, keep=keep)
        self._own_accumulators: tuple[list[bool], list[Node | None]] = [], []
        """Of a resident layer, with which of its parameters were trained then: its weights do not move."""
        module.forward = _Forward(self)  # type: ignore[method-assign]

    def _look_at(self, module: nn.Module) -> None:
        """Notes what the layer is made of, which has to be there from now on."""
        placed = {id(parameter) for parameter in self.unit.parameters}
        owners = ((m, name, p) for m in module.modules() for name, p in m._parameters.items())
        self._owners = [(weakref.ref(m), name, p) for m, name, p in owners if p is not None and id(p) in placed]
        self._parameters = [*module.parameters()]  # those that lie elsewhere as well
        self._elsewhere = [parameter for parameter in self._parameters if id(parameter) not in placed]
        self._places = ModulePlaces(module)
        self.members = Members(module.named_modules(prefix=self.unit.name))

    def take_in(self, beside: Unit | None) -> None:
        """Called when modules may have been added to the layer, with the parameters ``beside``."""
        self._look_at(self.module)
        if beside is not None:
            self._beside.append(beside)

    @property
    def module(self) -> nn.Module:
        """The layer. Raises OffloadedModelError where there is none any more."""
        return there(self._module, self.unit.name)

    @property
    def forward(self) -> Callable[..., Any]:
        """The layer's own ``forward``."""
        return self._bound(self._own)

    def _bound(self, own: Callable[..., Any]) -> Callable[..., Any]:
        return own.__get__(self.module) if self._is_method else own  # type: ignore[attr-defined]

    def compile(self, **arguments: Any) -> None:
        """Has the layer compiled from now on; ``arguments`` are torch.compile's."""
        compiling, settings = self.engine.compiling, CompilerSettings.of(arguments)
        assert settings is not None
        settings.check_activations(compiling.activations)
        self.compiled = compiling.compile(self.module, self._own, settings, is_method=self._is_method, keep=self.keep)

    @opaque
    def met_by_compiler(self) -> None:
        """Called when torch.compile, around the layer, meets it."""
        compiling = self.engine.compiling
        own = compiling.layer(self.module, self._own, is_method=self._is_method, keep=self.keep)
        self.compiled = own or self.compiled
        if self.compiled is None:
            compiling.met()

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_not_transformed(self.unit.name)
        if not self.unit.resident:
            check_not_traced(self.unit.name)
        with self.engine.turns.taken():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine, training = self.engine, torch.is_grad_enabled()
        outside_modes(functools.partial(self._enter, training))
        leader = batch_of(args, kwargs) if getattr(self.module, "has_samples", True) else None
        run = Run(self.layer, self.unit.generation, 0 if leader is None else leader.shape[0])
        nodes, returning = set(), False
        users, first = 0 if self.unit.resident else engine.window.users(self.layer), _next_node()
        try:
            by_itself = self.is_kept_by_itself
            output = self._pieces(run, args, kwargs, by_itself) if training else self._evaluated(args, kwargs)
            if not self.unit.resident:
                output = copied_out(output, engine.window.holds)
                check_let_go(self.unit, engine.window, users)
            nodes = nodes_of(output) if training else set()
            if returning := bool(nodes):
                accumulators = Accumulators(self.unit, run, nodes=self._accumulators(), hold=self.keep)
        except RuntimeError as error:
            inputs: list[Tensor] = []
            flatten((args, kwargs), inputs)
            check_mixed(error, self.unit.name, self.unit.dtype, inputs, self.module.buffers())
            raise
        finally:
            outside_modes(functools.partial(engine.window.end_forward, self.layer, returning=returning))
        if returning:
            engine.ran(run, accumulators)
            own = {node for node in nodes if node._sequence_nr() >= first}  # others are of inputs that it returns
            for node in own or nodes:
                node.register_prehook(functools.partial(self._enter_backward, accumulators, by_itself))
        return output

    def _enter(self, training: bool) -> None:
        behind = self.engine.enter(self)
        self.engine.window.begin_forward(self.layer, training=training, behind=behind)

    def check(self) -> None:
        """Raises OffloadedModelError where modules or parameters were added or replaced since ``offload``."""
        check_not_swapped(self.unit.name, self.unit.parameters)
        if self._is_of_class and type(self.module).forward is not self._own:
            self._take_forward()
        if self.members.same():
            return
        there = ((module(), name, parameter) for module, name, parameter in self._owners)
        check_held(self.unit.name, ((module, name, p) for module, name, p in there if module is not None))
        self.engine.refuse_changes()

    def _take_forward(self) -> None:
        """Computes from now on with the ``forward`` that the layer's class has now, or the class that the layer has."""
        if self.compiled is not None:
            raise OffloadedModelError(
                "a compiled layer keeps the forward that it was compiled with (the class of "
                f"{self.unit.name}, {type(self.module).__name__}, has another now); change it before offload()"
            )
        self._own = type(self.module).forward

    def _accumulators(self) -> list[Node | None]:
        """Returns what autograd adds the gradients of the run under way up with."""
        if not self.unit.resident:
            return accumulators_of(self.unit)
        with torch._C.DisableTorchFunctionSubclass():
            trained = [parameter.requires_grad for parameter in self.unit.parameters]
        if self._own_accumulators[0] != trained:
            self._own_accumulators = trained, accumulators_of(self.unit)
        return self._own_accumulators[1]

    def _bare(self, *args: Any, **kwargs: Any) -> Any:
        return self._by(self._own, args, kwargs)

    def _by(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._beside:
            return self._uncached(self._bound(own), args, kwargs)
        with bound(self._beside):
            return self._uncached(self._bound(own), args, kwargs)

    def _evaluated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.compiled is not None and (graph := self.compiled.forward(args, kwargs)) is not None:
            try:
                return self._compiled(graph, args, kwargs)
            except Exception as error:
                self._fall_back(error)
        return self._bare(*args, **kwargs)

    def _compiled(self, graph: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A parameter that waits when it is looked at would break the graph.
        units = {unit for parameter in self._elsewhere if (unit := unit_of(parameter)) is not None}
        with bound([*units]):
            return self._uncached(graph, args, kwargs)

    def _fall_back(self, error: Exception) -> None:
        """Returns where the layer is to run eagerly, for it could not be compiled; raises any other ``error``."""
        if not is_compile_error(error):
            raise error
        assert self.compiled is not None
        self.compiled.failed(error)

    def _uncached(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Autocast caches the casts of weights by their identity for as long as it is active: cleared at both ends, it
        # neither keeps every layer's cast weights on the device nor makes the second run differ from the first.
        if not torch.is_autocast_enabled(self._device_type):
            return forward(*args, **kwargs)
        torch.clear_autocast_cache()
        try:
            return forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    @property
    def is_kept_by_itself(self) -> bool:
        """Whether what autograd saves of the layer stays true without our help, until its weights are updated."""
        return self.keep and self.unit.resident and not self.engine.updates_in_backward()

    def _pieces(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], by_itself: bool) -> Any:
        if self.engine.micro_batch is None:
            return self._piece(run, args, kwargs, by_itself)
        pieces = MicroBatches(args, kwargs, self.engine.micro_batch, self.module)
        if len(pieces.calls) == 1:
            return self._piece(run, *pieces.calls[0], by_itself)
        writes, recorded, outputs = ModuleWrites(self.module, self.unit.name), Recorded(), []
        for call in pieces.calls:
            with pieces.explained(self.unit.name), recorded.piece():
                outputs.append(self._piece(run, *call, by_itself))
        writes.check()
        output, joined = pieces.join([*zip(outputs, recorded.pieces, strict=True)])
        recorded.add(joined)
        return output

    def _piece(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], by_itself: bool) -> Any:
        if self.compiled is not None and (graph := self.compiled.forward(args, kwargs)) is not None:
            # Its backward graph computes again what is to be: checkpointed as a whole, it would save as much and run
            # to its end, for it is one node.
            compute = functools.partial(self._compiled, graph, args, kwargs)
            try:
                output = compute() if by_itself else self._saved_by_hooks(run, compute, args, kwargs)
            except Exception as error:
                self._fall_back(error)
            else:
                if not by_itself:
                    self._check_saved(output)
                return output
        if by_itself:
            return self._bare(*args, **kwargs)
        if self.keep:
            return self._saved_by_hooks(run, functools.partial(self._bare, *args, **kwargs), args, kwargs)
        return self._recomputed(run, args, kwargs)

    def _saved_by_hooks(
        self, run: Run, compute: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns what ``compute`` does, with what autograd saves fetched again where it lies in the layer's slot."""
        send = None
        if (host := self.engine.activations) is not None:
            inputs: list[Tensor] = []
            flatten((args, kwargs), inputs)
            send = host.sending(self.unit.name, inputs)
        with self._saving(run, send):
            return compute()

    def _saving(
        self, run: Run, send: Callable[[Tensor], KeptInput | None] | None = None
    ) -> AbstractContextManager[None]:
        """Has what autograd saves in a block fetched again where it lies in the layer's slot, and kept otherwise."""
        begin = self.engine.window.place_of(self.layer)
        place = run, begin, begin + self.unit.layout.total_bytes
        keep = functools.partial(pack, *place) if send is None else functools.partial(pack_on_host, *place, send)
        return torch.autograd.graph.saved_tensors_hooks(keep, functools.partial(unpack, self._owner, self.unit.name))

    def _check_saved(self, output: Any) -> None:
        """Raises OffloadedModelError where a compiled layer holds a weight that autograd's hooks have not seen."""
        begin, length = self.engine.window.place_of(self.layer), self.unit.layout.total_bytes
        for node in nodes_of(output):
            for tensor in getattr(node, "_tensors_no_vc_check", ()):
                if begin <= tensor.data_ptr() < begin + length:
                    refuse_saved(self.unit.name)

    def _versions_elsewhere(self) -> list[int]:
        """Returns the versions of the parameters that the layer uses and that are not in its unit."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self._elsewhere]

    def _recomputed(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = ParametrizationCache(self.module, self.unit.name)
        tensors: list[Tensor] = []
        copies = GeneratorCopies()
        arguments = flatten((args, kwargs), tensors, copies)
        # The first run gets what the caller gave, not copies: a cache must be filled, a list appended to.
        state, hooks = State(self._places, copies), ForwardHooks(self._places.modules)
        trained, versions = [p.requires_grad for p in self._parameters], self._versions_elsewhere()
        own = self._own if self._is_of_class else None  # another may refer to the layer
        again = _Again(run, own, [(args, kwargs)], arguments, trained, versions, state, hooks, cache)
        del args, kwargs
        compute = functools.partial(_compute, self._owner, self.unit.name, again)
        with ExitStack() as stack:
            if (host := self.engine.activations) is not None:
                keep = functools.partial(pack_input, host.keeping(self.unit.name, tensors))
                give = functools.partial(unpack_input, self._owner, self.unit.name, run)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, give))
            device, runs = self.engine.device.torch_device, self.engine.second_runs
            return checkpointed(compute, *tensors, device=device, layer=self.unit.name, runs=runs)


class _Again(NamedTuple):
    """What a layer's second run needs; ``first`` is what the first run gets, until then.

    ``own`` is the forward that the layer's class had in the first run, where it is that.
    """

    run: Run
    own: Callable[..., Any] | None
    first: list[Any]
    arguments: Any
    trained: list[bool]
    versions: list[int]
    state: State
    hooks: ForwardHooks
    cache: ParametrizationCache


# What autograd calls is not made for each run: what keeps a function from the compiler refers to it, and it to that.


@opaque
def _compute(block: weakref.ref[Block], layer: str, again: _Again, *tensors: Tensor) -> Any:
    this = there(block, layer)
    if again.first:
        args, kwargs = again.first.pop()
        with again.hooks.first(functools.partial(this._saving, again.run)):
            output = this._bare(*args, **kwargs)
        again.state.ran()
        return output
    this.engine.return_to(again.run)
    if this._versions_elsewhere() != again.versions:
        raise stale_error(layer, "; a layer that writes its own weights needs offload(..., activations='keep')")
    copies = GeneratorCopies()
    args, kwargs = fill(again.arguments, tensors, copies)
    trained = requiring_grad(zip(this._parameters, again.trained, strict=True))
    hooks = again.hooks.again(functools.partial(this._saving, again.run))
    # The hooks come last: they tell a checkpoint of the layer's own from what packs where they begin.
    with trained, again.state.again(copies), again.cache.again(), hooks:
        return this._by(again.own or this._own, args, kwargs)


@opaque
def _enter_backward(
    block: weakref.ref[Block],
    layer: str,
    held: Accumulators[Run],
    by_itself: bool,
    gradients: tuple[Tensor | None, ...],
) -> None:
    """Called when a backward pass comes to a layer, before anything of it is computed; the graph holds ``held``.

    Autograd asks for the weights that it has saved. A checkpoint within the layer saves none and computes with the
    layer's parameters, so that the layer is opened here, unless its weights have changed since. What was kept
    ``by_itself`` asks for nothing.
    """
    if torch.is_grad_enabled():
        raise OffloadedModelError(
            "create_graph=True keeps the graph of a backward pass, and with it weights on the device that the window "
            f"takes back (got it in {layer}); compute second derivatives on a model that is not offloaded"
        )
    this = there(block, layer)
    this.engine.begin_backward()
    if (run := held.run) is not None:
        if by_itself or not is_stale(this.unit, run):
            this.engine.return_to(run)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            held.run = None


class _Forward:
    """Stands for the ``forward`` of a layer; a copy of the layer, in memory or in a file, gets its own back."""

    def __init__(self, block: Block) -> None:
        own = block.forward
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))
        self.__dict__.update(getattr(own, "__dict__", {}))
        self._block = block

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Where ``inspect`` reads the signature; kept, it would be a way from the layer to itself."""
        return self._block.forward

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if callable(get_eval_frame_callback()):  # the compiler would have had this call
            self._block.met_by_compiler()
        return self._block(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable[..., Any]:
        return copy.deepcopy(self._block.forward, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._block.forward.__reduce_ex__(protocol)


def block_of(module: nn.Module) -> Block | None:
    """Returns the block of a layer of an offloaded model, or None for any other module."""
    forward = module.__dict__.get("forward")
    return forward._block if isinstance(forward, _Forward) else None
