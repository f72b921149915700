"""What is left of the parameters of a model that was closed."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from torch import nn

from stronghold.errors import OffloadedModelError
from stronghold.unit.calls import FACTS, key_of


class ClosedParameter(nn.Parameter):
    """A parameter of a model that was closed: it has a shape and a dtype, and every look at its values is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if key_of(func) not in FACTS:
            raise closed_error()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of a model that was closed, of shape {tuple(self.shape)} and {self.dtype}"

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        raise closed_error()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise closed_error()


def closed_error() -> OffloadedModelError:
    return OffloadedModelError(
        "the model was closed by stronghold.close(), which gave its memory back, and cannot be used any more; build "
        "and offload it anew"
    )


def close_parameter(parameter: nn.Parameter) -> None:
    """Takes the values and the gradient of a parameter away."""
    parameter.__class__ = ClosedParameter
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None
        parameter.data = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    for name in ("_unit_reference", "_index"):
        parameter.__dict__.pop(name, None)
