"""Layers that ``torch.compile`` has made one graph of each class of, and those that run eagerly and why."""

from __future__ import annotations

import functools
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from stronghold.engine.arguments import flatten
from stronghold.engine.compiler_settings import RECOMPILES, CompilerSettings, NotCompiledError, recomputing
from stronghold.errors import OffloadedModelError
from stronghold.unit import is_packed


class Compiling:
    """What of a model is compiled. Layers whose ``forward`` and settings are the same share their graphs.

    Those that keep their activations have others than those that run again.
    """

    def __init__(self, kind: str, asked: bool | str | Mapping[str, Any], activations: int | str) -> None:
        self.kind = kind
        self.activations = activations
        self.default = CompilerSettings.of(asked)
        if self.default is not None:
            self.default.check_activations(activations)
        self._graphs: dict[tuple[Callable, CompilerSettings, bool], Graphs] = {}
        self.failed: set[tuple[Graphs | None, tuple[type, ...]]] = set()
        """Graphs that could not be made, each of layers of the same modules."""
        self._told: set[str] = set()

    def layer(self, module: nn.Module, own: Callable[..., Any], *, is_method: bool, keep: bool) -> CompiledLayer | None:
        """Returns how ``module``, whose class's ``forward`` is ``own``, is compiled; None where nobody asked for it.

        It may ``keep`` its activations, or run again in the backward pass.
        """
        settings = CompilerSettings.taken_from(module)
        if settings is not None:
            settings.check_activations(self.activations)
        elif (settings := self.default) is None or hasattr(own, "_torchdynamo_orig_callable"):
            return None  # in the latter case it is compiled already, by itself
        return self.compile(module, own, settings, is_method=is_method, keep=keep)

    def compile(
        self, module: nn.Module, own: Callable[..., Any], settings: CompilerSettings, *, is_method: bool, keep: bool
    ) -> CompiledLayer:
        return CompiledLayer(self, module, self._graph(own, settings, keep) if is_method else None, settings)

    def _graph(self, own: Callable[..., Any], settings: CompilerSettings, keep: bool) -> Graphs:
        key = own, settings, keep
        if key not in self._graphs:
            evaluation = settings.compile(own)
            self._graphs[key] = Graphs(evaluation if keep else settings.compile(recomputing(own)), evaluation)
        return self._graphs[key]

    def met(self) -> None:
        """Called when torch.compile, around the model, meets a layer, which it leaves alone."""
        self.tell(
            "torch.compile around an offloaded model leaves the layers as they are, for their parameters move while "
            f"they run, which a graph cannot follow (got a compiled {self.kind}, or a caller of it). They run eagerly, "
            "exactly and no faster; to compile the layers, pass offload(..., compile=True)"
        )

    def tell(self, message: str) -> None:
        """Warns of ``message``, once."""
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=2)


class Graphs(NamedTuple):
    """The compiled ``forward`` of a class of layers, which is called with the layer first.

    The one for training is computed again in its backward graph, if layers are; it is not for a call without one.
    """

    training: Callable[..., Any]
    evaluation: Callable[..., Any]


class CompiledLayer:
    """One layer's compiled ``forward``, and whether a call can take it.

    Which way a call takes is chosen before it begins, and a call that cannot be compiled runs eagerly as a whole.
    """

    def __init__(
        self,
        compiling: Compiling,
        module: nn.Module,
        graphs: Graphs | None,
        settings: CompilerSettings,
    ) -> None:
        self._compiling = compiling
        self._module = weakref.ref(module)
        self._graphs = graphs
        self.settings = settings
        self._class = graphs, tuple(type(inner) for inner in module.modules())
        self._packed = any(map(is_packed, module.parameters()))
        self.ran: bool | None = None
        """Whether the last call ran compiled; None before the first."""

    def keep_activations(self) -> None:
        """Has the layer trained, from now on, by the graph that computes nothing again."""
        if self._graphs is not None:
            self._graphs = Graphs(self._graphs.evaluation, self._graphs.evaluation)
            self._class = self._graphs, self._class[1]

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Returns what computes the layer for these arguments, or None where that is not compiled.

        Raises OffloadedModelError in place of the latter with ``fullgraph=True``.
        """
        self.ran = False
        module = self._module()
        if module is None or self._class in self._compiling.failed:
            return None
        if (reason := self._obstacle(module, args, kwargs)) is not None:
            self._refuse(module, reason)
            return None
        self.ran = True
        assert self._graphs is not None
        training, evaluation = self._graphs
        returning = training is not evaluation and torch.is_grad_enabled() and _trained(module, args, kwargs)
        return functools.partial(training if returning else evaluation, module)

    def _obstacle(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        if self._graphs is None:
            return "its forward is its own, not its class's; a graph for each layer would be compiled"
        if not getattr(module, "has_samples", True):
            return "experts in parts get another number of rows in each call, and each would be compiled for itself"
        if self._packed:
            return "it has packed weights, and a graph would keep them where the window takes them back"
        for value in (*args, *kwargs.values()):
            if (state := _state_in(value)) is not None:
                return (
                    f"an argument is a {state}, an object whose state each layer changes in its own place, and each "
                    "would be compiled for itself; leave it out of training, as use_cache=False does in transformers"
                )
        if nn.modules.module._has_any_global_hook():
            return "there are hooks for all modules, which a graph would leave out"
        for inner in module.modules():
            if inner is not module and (
                inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
            ):
                return f"a {type(inner).__name__} in it has hooks, which a graph would leave out; remove them"
            if inner is not module and "forward" in vars(inner):
                return f"the forward of a {type(inner).__name__} in it is its own, not its class's"
        return None

    def failed(self, error: Exception) -> None:
        """Called when the call could not be compiled; nothing of it has been computed. Raises as ``forward`` does."""
        self.ran = False
        module = self._module()
        assert module is not None
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchRuntimeError
        from torch._inductor.exc import InvalidCxxCompiler

        # Those may be of this call alone: what the layer itself raises, or the compiler's stance of the moment.
        if not isinstance(error, (TorchRuntimeError, NotCompiledError)):
            self._compiling.failed.add(self._class)
        if isinstance(error, FailOnRecompileLimitHit):
            reason = (
                f"it has {RECOMPILES} graphs already, for as many shapes, or numbers that it keeps; "
                'for inputs of many lengths pass compile={"dynamic": True}'
            )
        else:
            cause = getattr(error, "inner_exception", error)
            first = next((line for line in str(cause).splitlines() if line.strip()), "")
            reason = f"{type(cause).__name__}: {first.strip()}"
            if isinstance(cause, InvalidCxxCompiler):
                reason += "; install one (g++ or clang++), or name it in the environment variable CXX"
        self._refuse(module, reason, error)

    def _refuse(self, module: nn.Module, reason: str, error: Exception | None = None) -> None:
        kind = type(module).__name__
        if self.settings.strict:
            raise OffloadedModelError(
                f"with fullgraph=True a layer must be one graph (got a {kind} that cannot be compiled: {reason}); "
                "leave fullgraph out to have such layers run eagerly"
            ) from error
        self._compiling.tell(f"a {kind} is not compiled and runs eagerly, as exactly and no faster: {reason}")


def is_compile_error(error: Exception) -> bool:
    """Whether ``error`` was raised while torch.compile compiled, so that nothing has been computed."""
    from torch._dynamo import convert_frame
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    if isinstance(error, (NotCompiledError, TorchDynamoException, InductorError)):  # their tracebacks are cut short
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return convert_frame.__file__ in frames


def refuse_saved(layer: str) -> NoReturn:
    """Raises OffloadedModelError for a compiled layer that holds weights where the engine does not see them."""
    raise OffloadedModelError(
        f"what a layer saves for its backward pass must go through autograd's hooks (a torch.autograd.Function in "
        f"{layer} keeps a weight in its context, and the graph holds it where the window takes it back); use "
        "ctx.save_for_backward there, or offload(..., compile=False)"
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile(module)`` stands for, or ``model`` itself.

    It has the parameters under their own names, which the other one's begin with ``_orig_mod``.
    """
    if "_orig_mod" in model._modules:
        from torch._dynamo import OptimizedModule  # which takes a while to import, and is there if one is

        while isinstance(model, OptimizedModule):
            model = model._orig_mod
    return model


_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


def _state_in(value: Any) -> str | None:
    """Returns the class of an object with a state of its own in an argument, if there is one."""
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := _state_in(item)) is not None), None)
    if type(value) is dict:
        return next((found for item in value.values() if (found := _state_in(item)) is not None), None)
    return type(value).__name__


def _trained(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd has a graph of a call, if it records one."""
    inputs: list[Tensor] = []
    flatten((args, kwargs), inputs)
    return any(tensor.requires_grad for tensor in (*inputs, *module.parameters()))
