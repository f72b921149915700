"""What autograd tells of parameters: that a gradient comes, and that it has come."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stronghold.engine.asked_gradients import answer_for_layers
from stronghold.unit import Unit, as_written, opaque
from stronghold.window import DeviceGradients, Gradients, OfSums, Parts

_Expect = Callable[[Unit, int, Tensor | None], Tensor | None]


class Hooks:
    """Hooks on the parameters of layers and of the root.

    ``expect`` is called with a layer's gradient before all hooks of the user, and before autograd adds it to one that
    is there. The user's hooks on a layer's parameters are called with whole gradients alone. Nothing is kept alive: the
    garbage collector does not see through hooks of a parameter, and a model without users must go.
    """

    def __init__(
        self,
        expect: _Expect,
        gradients: Gradients,
        device_gradients: DeviceGradients,
    ) -> None:
        answer_for_layers()
        self._parts = gradients.parts
        self._handles: dict[int, RemovableHandle] = {}
        self._hooks: dict[Unit, tuple[list[bool], list[tuple[dict[int, Any], dict[int, Any]]]]] = {}
        """Which parameters of a layer were trained, and PyTorch's own dictionaries of the hooks before and behind."""
        self._expect, self._expect_root = _parts(expect), _parts(device_gradients.expect)
        self._show_sum = _weakly(gradients.show_sum)
        self._take, self._take_root = _weakly(gradients.take), _weakly(device_gradients.take)

    def on_layer(self, unit: Unit) -> bool:
        """Has the gradients of a layer that is about to compute taken, after all hooks of the user.

        Returns whether these hooks were there before and are the only ones.
        """
        with torch._C.DisableTorchFunctionSubclass():
            trained = [parameter.requires_grad for parameter in unit.parameters]
            if self._has_own_alone(unit, trained):
                return True
            for index, parameter in enumerate(unit.parameters):
                if not parameter.requires_grad:
                    continue
                handle = self._handles.get(id(parameter))
                if handle is None:
                    expecting = parameter.register_hook(_before(unit, index, self._expect, self._parts))
                    _first(parameter._backward_hooks or {}, expecting)
                elif next(reversed(parameter._post_accumulate_grad_hooks), None) != handle.id:
                    handle.remove()  # the user has added a hook since, which is to see the gradient before it goes
                    handle = None
                if handle is None:
                    self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._take)
                self._of_sums(unit, index, parameter)
            hooks = [
                (parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {})
                for parameter in unit.parameters
                if parameter.requires_grad
            ]
            self._hooks[unit] = trained, hooks
            return False

    def _has_own_alone(self, unit: Unit, trained: list[bool]) -> bool:
        """Whether nothing has changed since the hooks were set: then there is nothing to put in order."""
        if unit not in self._hooks or self._hooks[unit][0] != trained:
            return False
        return all(len(before) == 1 == len(behind) for before, behind in self._hooks[unit][1])

    def _of_sums(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Keeps parts of gradients from the user's hooks: all but the first that go before and the last behind."""
        assert unit.layer is not None
        before: dict[int, Any] = parameter._backward_hooks or {}
        behind: dict[int, Any] = parameter._post_accumulate_grad_hooks
        for hooks, own, first in (before, 0, None), (behind, len(behind) - 1, self._show_sum):
            if len(hooks) == 1:
                continue
            for position, (number, hook) in enumerate(list(hooks.items())):
                if position != own and not isinstance(hook, OfSums):
                    hooks[number] = OfSums(hook, self._parts, (unit.layer, index), first)

    def on_root(self, unit: Unit) -> None:
        """Has a root parameter's gradient summed in fp32, in its own memory, before the user's hooks see it."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(unit.parameters):
                if not parameter.requires_grad or id(parameter) in self._handles:
                    continue
                parameter.register_hook(_about(unit, index, self._expect_root))
                handle = self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._take_root)
                _first(parameter._post_accumulate_grad_hooks, handle)


def _first(hooks: dict[int, Any], handle: RemovableHandle) -> None:
    """Puts a hook before the others of a parameter."""
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)


def _parts(method: Callable) -> tuple[weakref.ref[Any], Callable]:
    """Returns a bound method's object, weakly, and its function: to call a WeakMethod takes three times as long."""
    bound = cast(MethodType, method)
    return weakref.ref(bound.__self__), bound.__func__


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    reference, function = _parts(method)

    @opaque
    def hook(parameter: nn.Parameter) -> None:
        if (owner := reference()) is not None:
            if "_index" not in getattr(parameter, "__dict__", ()):  # what a hook of the user's before has returned
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as PyTorch says it
            function(owner, parameter)

    return hook


def _before(
    unit: Unit, index: int, call: tuple[weakref.ref[Any], Callable], parts: Parts
) -> Callable[[Tensor | None], Tensor | None]:
    """Returns :func:`_about` for a layer's gradient, called only where it may have something to do."""
    layer, about = unit.layer, _about(unit, index, call)

    @as_written
    def hook(gradient: Tensor | None) -> Tensor | None:
        if parts.whole_layer == layer and parts.whole_thread == get_ident():
            return None
        return about(gradient)

    return hook


def _about(unit: Unit, index: int, call: tuple[weakref.ref[Any], Callable]) -> Callable[[Tensor | None], Tensor | None]:
    (owned, function), reference = call, weakref.ref(unit)

    @opaque
    def hook(gradient: Tensor | None) -> Tensor | None:
        if (owner := owned()) is None or (its := reference()) is None:
            return None
        return function(owner, its, index, gradient)

    return hook
