"""Refuses parameters that are not what an engine can move: dense floating-point numbers in memory of their own."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stronghold.unit import all_parameters, is_packed

_QUANTISED = (
    "quantised weights can be offloaded where they are bitsandbytes' in four or eight bits, or subclasses with "
    "__tensor_flatten__ such as torchao's: load the model so, or in torch.bfloat16 or torch.float32"
)
_OF_CLASS = {
    "DTensor": "offload the model before it is distributed; stronghold.replicate and stronghold.pipeline train one in "
    "several processes",
    "FakeTensor": "build the model outside of FakeTensorMode, or on the meta device with weights= for offload()",
}


def check_parameters(model: nn.Module, known: Collection[int] = ()) -> None:
    """Raises ValueError for the first parameter that is of another kind, or not initialised yet.

    Those whose ids are ``known`` have been offloaded already.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"parameters and buffers must be initialised (got {name}, of a lazy module, without a shape); run the "
                "model on one batch before offload()"
            )
    for name, parameter in model.named_parameters():
        if id(parameter) not in known and not is_packed(parameter) and (found := _other_kind(parameter)) is not None:
            what, remedy = found
            raise ValueError(
                f"a parameter must be a plain nn.Parameter of dense floating-point numbers (got {name}, {what}); "
                f"{remedy}"
            )


def check_memory_is_their_own(model: nn.Module) -> None:
    """Refuses parameters and buffers that share memory without being one: each would go its own way from here on.

    Some of them may have been offloaded already. Raises ValueError.
    """
    spans: list[tuple[int, int, str, Tensor]] = []
    for name, tensor in [*all_parameters(model), *model.named_buffers()]:
        if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if isinstance(tensor, nn.Parameter) and reach < tensor.numel():
            raise ValueError(
                f"every element of a parameter must have memory of its own (got {name} of shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}); make it a parameter of its own values (.clone())"
            )
        with torch._C.DisableTorchFunctionSubclass():  # what is offloaded would take it for a use of its memory
            begin = tensor.data_ptr()
        spans.append((begin, begin + reach * tensor.element_size(), name, tensor))
    spans.sort(key=lambda span: span[:3])
    for (_, end, one, first), (begin, _, other, second) in pairwise(spans):
        if begin < end and any(isinstance(t, nn.Parameter) for t in (first, second)) and _share_memory(first, second):
            raise ValueError(
                f"parameters must not share memory unless they are one parameter (got {one} and {other}); assign the "
                "same nn.Parameter to both, or clone one"
            )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose memory overlaps from first to last element have an element in common."""
    if (one.is_contiguous() and other.is_contiguous()) or not one.is_cpu:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        found = [t.detach().view(torch.int16) if t.dtype == torch.bfloat16 else t.detach() for t in (one, other)]
        return np.shares_memory(found[0].numpy(), found[1].numpy())


def _other_kind(parameter: Tensor) -> tuple[str, str] | None:
    """Returns what a parameter is, and what to do, where it is of another kind."""
    kind = type(parameter)
    if parameter.is_nested:
        return "a nested tensor", "pad it before offload()"
    if kind is not nn.Parameter:
        what = f"a {kind.__module__}.{kind.__qualname__}"
        if kind.__name__ in _OF_CLASS:
            return what, _OF_CLASS[kind.__name__]
        if kind.__module__.partition(".")[0] in ("torchao", "bitsandbytes") or not parameter.is_floating_point():
            return what, _QUANTISED
        return what, "its class would be lost: make it an nn.Parameter, which may have attributes, before offload()"
    if parameter.is_quantized:
        return f"of {parameter.dtype}", _QUANTISED
    if parameter.layout != torch.strided:
        return f"of layout {parameter.layout}", "make it dense (to_dense()) before offload()"
    if parameter.is_complex():
        return f"of {parameter.dtype}", "keep its torch.view_as_real() as the parameter"
    if not parameter.is_floating_point():
        return f"of {parameter.dtype}", f"register it as a buffer, which stays on the device; {_QUANTISED}"
    if parameter.is_inference():
        return "made under torch.inference_mode()", "build or load the model outside of it"
    return None
