"""bitsandbytes' products with quantised weights, whose backward pass finds a weight wherever it is by then.

Its autograd functions keep the weight, or the input, as attributes of their context. No hook of autograd's sees these:
a backward pass would compute with what the weight's place on the device holds by then, and a checkpoint would free
nothing. Here the same functions save the same tensors by ``save_for_backward``.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

_FUNCTIONS = ("MatMul4Bit", "MatMul8bitLt", "MatMul8bitFp")
_PRODUCTS = ("matmul", "matmul_4bit")


def save_by_autograd(module: nn.Module) -> None:
    """Has a linear layer of bitsandbytes compute as it does, but save what its backward pass needs as autograd knows.

    The module's class becomes one of its own; copies of it, in memory or in a file, have the one that it had.
    """
    if "_old_forward" in module.__dict__:  # accelerate's hooks call this one
        module._old_forward = types.MethodType(_saving_forward(_own_forward(module)), module)  # type: ignore[assignment]
    elif not hasattr(type(module), "_own"):
        kind: Any = type(module)
        module.__class__ = _saving_class(kind)


def is_known(module: nn.Module) -> bool:
    """Whether a module computes as bitsandbytes' own linear layers do."""
    layers = sys.modules["bitsandbytes"].nn
    is_hooked = "forward" in module.__dict__ and "_old_forward" not in module.__dict__
    return not is_hooked and _own_forward(module) in (layers.Linear4bit.forward, layers.Linear8bitLt.forward)


def _own_forward(module: nn.Module) -> Any:
    own: Any = getattr(type(module), "_own", type(module))
    return own.forward


@functools.cache
def _saving_class(own: Any) -> Any:
    def reduce(self: nn.Module, protocol: int) -> Any:
        function, (_, *others), *rest = own.__reduce_ex__(self, protocol)
        return function, (own, *others), *rest

    members = {
        "forward": _saving_forward(own.forward),
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "_own": own,
    }
    if issubclass(own, sys.modules["bitsandbytes"].nn.Linear8bitLt):
        members["_load_from_state_dict"] = _loading_scales(own)
    return type(own.__name__, (own,), members)


def _loading_scales(own: Any) -> Any:
    """Returns what loads a layer in eight bits also when its scales are in its state, as they are from the first call.

    bitsandbytes looks for them at the weight alone, and takes the layer for one that is not quantised.
    """

    def load(self: Any, *arguments: Any) -> None:
        weight, at_weight = self.weight, getattr(self.weight, "SCB", None)
        weight.SCB = self.state.SCB if at_weight is None else at_weight
        try:
            own._load_from_state_dict(self, *arguments)
        finally:
            weight.SCB = at_weight

    return load


@functools.cache
def _saving_forward(own: Any) -> Any:
    """Returns a function of the same code, to which the products of bitsandbytes are those that save by autograd."""
    library = sys.modules["bitsandbytes"]
    module = library.autograd._functions
    functions = {name: _saving(getattr(module, name)) for name in _FUNCTIONS if hasattr(module, name)}
    products = {name: _with_globals(getattr(module, name), functions) for name in _PRODUCTS}
    return _with_globals(own, {"bnb": types.SimpleNamespace(**{**vars(library), **products})})


def _with_globals(function: Any, others: dict[str, Any]) -> Any:
    names = {**function.__globals__, **others}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


def _saving(function: Any) -> type[Function]:
    class Saving(function):
        """``function`` of bitsandbytes, with the same bits."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            state = arguments[-1]
            weight = getattr(state, "CB", None)  # of eight bits; those of four are an argument
            there = None if weight is None else weight.data
            with _computing_with(state, there):
                output: Tensor = function.forward(ctx, *arguments)
            if not getattr(ctx, "is_empty", False):
                # To ask for the weight brings its layer back, whose scales are used then.
                ctx.save_for_backward(*getattr(ctx, "tensors", ()), getattr(ctx, "A", None), there)
                ctx.tensors = ctx.A = None
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if getattr(ctx, "is_empty", False):
                return function.backward(ctx, *gradients)
            *ctx.tensors, ctx.A, there = ctx.saved_tensors
            try:
                with _computing_with(ctx.state, there):
                    return function.backward(ctx, *gradients)
            finally:
                ctx.tensors = ctx.A = None

    return Saving


@contextmanager
def _computing_with(state: Any, weight: Tensor | None) -> Iterator[None]:
    """Has a weight in eight bits be a plain tensor in its ``state`` for the block; outside it is the parameter."""
    if weight is None:
        yield
        return
    parameter, state.CB = state.CB, weight
    try:
        yield
    finally:
        state.CB = parameter
