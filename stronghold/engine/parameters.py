"""Refuses parameters that are not what an engine can move: dense floating-point numbers in memory of their own."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stronghold.unit import is_packed

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
