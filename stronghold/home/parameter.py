"""Parameters and gradients that wait for their update when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError
from stronghold.home.home import Home

# What tells of a tensor and not of its values: asking for it waits for nothing.
_FACTS = frozenset(
    [
        "get:shape",
        "get:dtype",
        "get:device",
        "get:layout",
        "get:requires_grad",
        "get:grad",
        "get:grad_fn",
        "get:is_leaf",
        "get:ndim",
        "get:names",
        "get:_version",
        "get:output_nr",
        "get:is_cpu",
        "get:is_cuda",
        "get:is_meta",
        "get:is_sparse",
        "get:is_quantized",
        "get:is_mkldnn",
        "get:is_nested",
        "get:is_xla",
        "get:is_mps",
        "get:is_xpu",
        "get:itemsize",
        "get:nbytes",
        "get:retains_grad",
        "get:_backward_hooks",
        "get:_post_accumulate_grad_hooks",
        "get:_base",
        "get:name",
        "get:grad_dtype",
        "set:requires_grad",
        "set:grad",
        "set:_backward_hooks",
        "set:grad_dtype",
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_pinned",
        "is_shared",
        "is_inference",
        "get_device",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "has_names",
        "_is_view",
        "__len__",
        "__dlpack_device__",
        "is_signed",
        "is_conj",
    ]
)
# What hands out the memory itself: a later write through it leaves no trace in the version.
_ALIASES = frozenset(
    [
        "get:data",
        "detach",
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "numpy",
        "__array__",
    ]
)


def _key(function: Callable) -> str:
    name = function.__name__
    if name in ("__get__", "__set__"):
        return f"{name[2:5]}:{function.__self__.__name__}"  # type: ignore[attr-defined]
    return name


def _walk(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _walk(value)
        elif isinstance(value, Tensor):
            yield value


class OffloadedParameter(nn.Parameter):
    """What a parameter of an offloaded model is while it is not being computed with.

    An ordinary parameter on the CPU (an edge: on the device) in every respect but one: whoever reads or writes its
    values waits until the update under way has written them. ``copy.deepcopy`` and ``pickle`` make plain parameters.
    """

    _home: Home

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        key = _key(func)
        if key in ("get:grad", "set:grad"):
            _end_failed_backward(args[0])
        if key == "set:data" and isinstance(args[0], OffloadedParameter):
            return args[0]._set_data(args[1])
        if key not in _FACTS:
            for value in _walk((args, tuple(kwargs.values()))):
                if isinstance(value, OffloadedParameter) and (home := _home_of(value)) is not None:
                    home.wait_updated()
                    if key in _ALIASES:
                        home.touched = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _set_data(self, value: Tensor) -> None:
        """Takes the values of ``p.data = value`` over: the memory itself is the home's."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise OffloadedModelError(
                f"the data of an offloaded parameter keeps its shape and dtype ({tuple(self.shape)} {self.dtype}; got "
                f"{tuple(value.shape)} {value.dtype}); change the parameter before offload()"
            )
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if (home := _home_of(self)) is not None:
            home.wait_updated()
        with torch._C.DisableTorchFunctionSubclass():
            return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex):
        return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})


class BoundParameter(nn.Parameter):
    """What a parameter is while its layer is on the device: a plain one, but for a backward pass that has failed."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        _end_failed_backward(self)
        return Tensor.grad.__get__(self)  # type: ignore[union-attr]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _end_failed_backward(self)
        Tensor.grad.__set__(self, value)  # type: ignore[union-attr]


def _end_failed_backward(parameter: Tensor) -> None:
    """Publishes the gradients of a backward pass that an error has ended, before somebody sees or drops them."""
    home = _home_of(parameter)
    if home is not None and home.owner is not None and torch._C._current_graph_task_id() == -1:
        home.owner.close_backward()


class PendingGradient(Tensor):
    """What a gradient is while an update under way still reads it; after the first look it is a plain tensor again."""

    _home: Home

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _key(func) not in _FACTS:
            for value in _walk((args, tuple(kwargs.values()))):
                if isinstance(value, PendingGradient):
                    value._settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _settle(self) -> None:
        self.__dict__.pop("_home").wait_updated()
        self.__class__ = Tensor  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex):
        self._settle()
        return self.__reduce_ex__(protocol)


class ConsumedGradient(Tensor):
    """What stands for a gradient that ``update="in_backward"`` has used up: every look at it is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if _key(func) not in _FACTS:
            raise consumed_error()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def consumed_error() -> RuntimeError:
    return OffloadedModelError(
        "update='in_backward' updates each layer during backward() and frees its gradient, so that no gradient can be "
        "read, clipped over the whole model, or added to by a second backward() before step() and zero_grad(); "
        "use update='deferred' for clipping and accumulation"
    )


def consumed_like(parameter: Tensor) -> ConsumedGradient:
    """Makes the stand-in for the gradient of ``parameter``: its shape and dtype, no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return one.expand(parameter.shape).as_subclass(ConsumedGradient)


def _home_of(parameter: Tensor) -> Home | None:
    return parameter.__dict__.get("_home")


def home_of(parameter: nn.Parameter) -> Home | None:
    """Returns where a parameter of an offloaded model lives, or None for any other parameter."""
    return _home_of(parameter)
