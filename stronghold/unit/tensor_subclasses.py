"""Quantised weights that are tensor subclasses around others, as torchao's are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stronghold.unit.quantised import Cell


class TensorSubclasses:
    """Subclasses that name the tensors within by ``__tensor_flatten__``; PyTorch's own (DTensor) are none of these.

    Such a weight has no memory of its own. Assigning to its ``data`` changes nothing; its attributes do.
    """

    may_be_kept = False
    """They save what they have dequantised."""

    def __init__(self) -> None:
        self._computed_with: set[tuple[type, torch.dtype, torch.device, str]] = set()
        """The classes that are known to have a backward pass on a device, with what of them is no tensor."""

    def has(self, parameter: Tensor) -> bool:
        kind = type(parameter)
        flattens = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
        return flattens and kind.__module__.partition(".")[0] != "torch"

    def moves_itself(self, parameter: Tensor) -> bool:
        return False

    def title(self, parameter: Tensor) -> str:
        return f"as {type(parameter).__name__}"

    def cells(self, module: nn.Module, parameter: Any) -> Iterator[Cell]:
        return self._cells(parameter, type(parameter).__name__)

    def _cells(self, holder: Any, prefix: str) -> Iterator[Cell]:
        for name in holder.__tensor_flatten__()[0]:
            if hasattr(inner := getattr(holder, name), "__tensor_flatten__"):
                yield from self._cells(inner, f"{prefix}.{name}")
            else:  # with its dtype, for a class may have several
                yield Cell(f"{prefix}.{name}.{str(inner.dtype).removeprefix('torch.')}", holder, name)

    def settle(self, module: nn.Module, parameter: Any, device: torch.device) -> None:
        pass

    def check(
        self, name: str, module: nn.Module, parameter: Any, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
        for cell in self.cells(module, parameter):
            if not (tensor := getattr(cell.holder, cell.name)).is_contiguous():
                raise ValueError(
                    f"the tensors that a quantised weight consists of must be contiguous (got {name}, a {kind}, whose "
                    f"{cell.name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}); quantise to another "
                    "layout before offload()"
                )
        dtype = dtype or parameter.dtype
        key = type(parameter), dtype, device, repr(parameter.__tensor_flatten__()[1])
        if key in self._computed_with or not isinstance(module, nn.Linear) or parameter.is_meta:
            return
        try:
            _compute_back(_with_values(parameter), device, dtype)
        except Exception as error:  # kernels raise all kinds for what they have not got
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"a quantised weight must have a backward pass to the layer's input (got {name}, a {kind} of "
                f"{parameter.dtype}, which with an input in {dtype} on {device} has none: {reason}); "
                + (f"compute in {parameter.dtype}, or " if dtype != parameter.dtype else "")
                + "quantise to a type that has one, such as torchao's Int8WeightOnlyConfig"
            ) from error
        self._computed_with.add(key)

    def unpacked(self, parameter: Any) -> Tensor | None:
        return None

    def pack(self, parameter: Any, value: Tensor) -> Iterator[Tensor]:
        raise AssertionError("values are quantised by the library that the class is of")

    def copy(self, parameter: Any, own: Any, memo: dict[int, Any]) -> nn.Parameter:
        raise AssertionError("it does not move itself: its cells are parameters, which are copied as such")


def _with_values(weight: Any) -> Any:
    """Returns a weight itself, or, where its tensors are on the meta device, one like it of zeros."""
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    if not any(tensor.is_meta for tensor in inner.values()):
        return weight
    zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in inner.items()}
    return type(weight).__tensor_unflatten__(zeros, context, weight.size(), weight.stride())


def _compute_back(weight: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Computes one row in ``dtype`` with ``weight`` on the device, and its gradient.

    Raises whatever comes where that cannot be.
    """
    weight = weight.detach().to(device)
    row = torch.ones(1, weight.shape[-1], dtype=dtype, device=device, requires_grad=True)
    with torch.enable_grad():
        output = functional.linear(row, weight)
    if not output.requires_grad:
        raise NotImplementedError("its output has no gradient")
    output.backward(torch.ones_like(output))
