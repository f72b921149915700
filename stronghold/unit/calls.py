"""What a call of a torch function does with the tensors it is given: tells of them, reads, writes or lends them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from stronghold.errors import OffloadedModelError

# What tells of a tensor and not of its values: asking for it waits for nothing.
FACTS = frozenset(
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
ALIASES = frozenset(
    [
        "get:data",
        "detach",
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "numpy",
        "__array__",
        "__array_interface__",
        "__dlpack__",
        "to_dlpack",
        "from_dlpack",
    ]
)


_COLLECTIVES = "torch.distributed.distributed_c10d"
_SENDING = ("send", "isend", "gather")
"""The ones that write nothing into their first argument."""
_FILLS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")


def written(function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that a function may write into: by torch's naming its first argument, or ``out``.

    An operator that torch does not have itself may write any of its arguments, whatever it declares.
    """
    if isinstance(function, (OpOverload, OpOverloadPacket)) and not _qualified(function).startswith("aten::"):
        return list(walk((args, tuple(kwargs.values()))))
    if getattr(function, "__module__", None) == _COLLECTIVES:
        first = args[:1] or tuple(kwargs.values())[:1]
        return list(walk(first)) if function.__name__ not in _SENDING else []
    key = key_of(function)
    out = list(walk((kwargs.get("out"),)))
    if key.startswith("_fused_"):
        return [*out, *walk(args)]  # they scale gradients as well
    if (key.endswith("_") and not key.endswith("__")) or key in _FILLS:
        return [*out, *(walk(args[:1]) if args else walk(kwargs.values()))]
    return out


def asking_collective() -> str:
    """Returns the collective of torch.distributed that asks what a tensor is like, or nothing.

    Behind that it hands the tensor to a process group, which writes into it, and of that no call tells: a collective is
    a call of its own from PyTorch 2.13 on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("stronghold."):
        frame = frame.f_back
    if frame.f_globals.get("__name__") != _COLLECTIVES:
        return ""
    while frame.f_back is not None and frame.f_code.co_name.startswith("<"):  # a list that it makes
        frame = frame.f_back
    return frame.f_code.co_name


def _qualified(function: OpOverload | OpOverloadPacket) -> str:
    return function.name() if isinstance(function, OpOverload) else function._qualified_op_name


def check_not_transformed(name: str) -> None:
    """Raises OffloadedModelError within a transform of ``torch.func``, whose tensors have no memory."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise OffloadedModelError(
            "an offloaded model computes with tensors that have memory (got those of a transform of torch.func, such "
            f"as vmap, grad or jvp, in {name}); call backward() or torch.autograd.grad, or transform a model that is "
            "not offloaded"
        )


def check_not_traced(name: str) -> None:
    """Raises OffloadedModelError within ``torch.jit.trace``, which would record how ``name`` moves, too."""
    if torch._C._is_tracing():
        raise OffloadedModelError(
            "an offloaded model cannot be recorded by torch.jit.trace, which SummaryWriter.add_graph and "
            f"torch.onnx.export(dynamo=False) call, for {name} is copied to a slot as it computes; record a "
            "copy.deepcopy(model), which is not offloaded, or the model before offload()"
        )


def hands_out(key: str, result: Any, value: Tensor) -> bool:
    """Whether the user now has another way to the memory of ``value``: an alias of it, or a view."""
    if key in ALIASES:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            other is not value and other.layout == torch.strided and other.untyped_storage()._cdata == _storage(value)
            for other in walk((result,))
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def key_of(function: Callable) -> str:
    name = function.__name__
    if isinstance(function, OpOverload):
        return name.split(".")[0]  # without its overload's name
    if name in ("__get__", "__set__"):
        return f"{name[2:5]}:{function.__self__.__name__}"  # type: ignore[attr-defined]
    return name


def walk(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from walk(value)
        elif isinstance(value, Tensor):
            yield value
