"""What autograd tells of parameters: that a gradient comes, and that it has come."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stronghold.home import Home, opaque
from stronghold.window import DeviceGradients, Gradients

_Expect = weakref.WeakMethod[Callable[[Home, Tensor], None]]


class Hooks:
    """Hooks on the parameters of layers and edges.

    ``expect`` hears of a layer's gradient before autograd adds it to one that is there. Nothing is kept alive: the
    garbage collector does not see through hooks of a parameter, and a model without users must go.
    """

    def __init__(
        self, expect: Callable[[Home, Tensor], None], gradients: Gradients, device_gradients: DeviceGradients
    ) -> None:
        self._handles: dict[int, RemovableHandle] = {}
        self._expect: _Expect = weakref.WeakMethod(expect)
        self._expect_edge: _Expect = weakref.WeakMethod(device_gradients.expect)
        self._take, self._take_edge = _weakly(gradients.take), _weakly(device_gradients.take)

    def on_layer(self, home: Home) -> None:
        """Has the gradients of a layer that is about to compute taken, after all hooks of the user."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in home.parameters:
                if not parameter.requires_grad:
                    continue
                handle = self._handles.get(id(parameter))
                if handle is None:
                    parameter.register_hook(_about(home, self._expect))
                elif next(reversed(parameter._post_accumulate_grad_hooks), None) == handle.id:
                    continue
                else:
                    handle.remove()  # the user has added a hook since, which is to see the gradient before it goes
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._take)

    def on_edge(self, home: Home) -> None:
        """Has an edge's gradient summed in fp32, in its own memory, before all hooks of the user, who see the sum."""
        parameter = home.parameters[0]
        with torch._C.DisableTorchFunctionSubclass():
            if not parameter.requires_grad or id(parameter) in self._handles:
                return
            if home.dtype != torch.float32:  # in fp32 autograd's own sum is exact enough
                parameter.register_hook(_about(home, self._expect_edge))
            handle = self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._take_edge)
            hooks = parameter._post_accumulate_grad_hooks
            for number in [number for number in hooks if number != handle.id]:
                hooks[number] = hooks.pop(number)  # behind ours


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    call = weakref.WeakMethod(method)

    @opaque
    def hook(parameter: nn.Parameter) -> None:
        if (bound := call()) is not None:
            bound(parameter)

    return hook


def _about(home: Home, call: _Expect) -> Callable[[Tensor], None]:
    unit = weakref.ref(home)

    @opaque
    def hook(gradient: Tensor) -> None:
        if (bound := call()) is not None and (its := unit()) is not None:
            bound(its, gradient)

    return hook
