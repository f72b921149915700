"""Weights that bitsandbytes has packed into four bits: what of them moves with their layer, and what stays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = {
    "absmax": ("quant_state", "absmax"),
    "nested_absmax": ("quant_state", "state2", "absmax"),
    "nested_offset": ("quant_state", "offset"),
}
"""What moves beside the bytes, by the names that bitsandbytes saves it under: a scale for each block."""
_CONSTANTS = (("quant_state", "code"), ("quant_state", "state2", "code"))
"""What is the same for each weight of a type: it stays on the device."""


def is_packed(parameter: Tensor) -> bool:
    """Whether ``parameter`` holds the packed bytes of a weight, or the scales of one: it computes in its own dtype."""
    return _is_weight(parameter) or "_is_scale" in parameter.__dict__


def all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields ``module.named_parameters()``, and behind each packed weight its scales, as parameters of their own.

    What bitsandbytes computes with becomes those parameters, so that they move by their ``data``, as all do. Their
    names have the type, by which a checkpoint of another is refused.
    """
    for name, parameter in module.named_parameters():
        yield name, parameter
        if _is_weight(parameter):
            kind = getattr(_follow(parameter, ["quant_state"]), "quant_type", None)
            for own, path in _PARTS.items():
                if (part := _part(parameter, path)) is not None:
                    yield f"{name}.{kind}.{own}", part


def constants(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yields what of the packed weights in ``module`` stays on the device: an object and its attribute."""
    for parameter in module.parameters():
        for *path, name in _CONSTANTS if _is_weight(parameter) else ():
            if isinstance(getattr(holder := _follow(parameter, path), name, None), Tensor):
                yield holder, name


def check_packed(model: nn.Module) -> None:
    """Raises ValueError for weights whose bytes are not there yet, or that are asked to train.

    Has their modules compute with the bytes as they are: for evaluation on some processors they would repack them.
    """
    for prefix, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None or not _is_weight(parameter):
                continue
            name = f"{prefix}.{own}" if prefix else own
            if getattr(parameter, "quant_state", None) is None:
                raise ValueError(
                    f"a weight in four bits must be quantised before it moves (got {name}, whose values are in "
                    f"{parameter.dtype}); call {prefix or 'model'}.to('cpu'), which packs it, before offload()"
                )
            if parameter.requires_grad:
                raise ValueError(
                    f"a quantised weight cannot be trained (got {name} with requires_grad); freeze it, and train "
                    "adapters beside it (peft.get_peft_model)"
                )
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False


def unpacked(tensor: Tensor) -> Tensor:
    """Returns what stands for a packed weight as it was before, on the meta device; any other tensor itself."""
    if not _is_weight(tensor):
        return tensor
    state: Any = tensor.quant_state  # type: ignore[attr-defined]
    return torch.empty(state.shape, dtype=state.dtype, device="meta")


def count_of(parameter: Tensor) -> int:
    """Returns how many numbers of the model a parameter holds: a packed weight those before, its scales none."""
    return 0 if "_is_scale" in parameter.__dict__ else unpacked(parameter).numel()


def pack(weight: Any, value: Tensor) -> Iterator[Tensor]:
    """Yields the bytes of a packed weight that is to hold ``value``, and its scales in the order of its parameters."""
    functional, state = sys.modules["bitsandbytes"].functional, weight.quant_state
    packed, found = functional.quantize_4bit(
        value.contiguous(),
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=weight.quant_storage,
    )
    yield packed
    yield found.absmax
    if state.nested:
        yield found.state2.absmax
        yield found.offset


def copy_of(weight: nn.Parameter, own: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Returns a copy of a packed weight whose class was ``own``, with copies of its scales."""
    copied: Any = own.__new__(own)
    memo[id(weight)] = copied
    state = own.__getstate__(weight)
    copied.__setstate__({**state, "data": weight.detach().clone()})
    copied.quant_state = copy.deepcopy(state["quant_state"], memo)
    return copied  # type: ignore[no-any-return]


def _is_weight(parameter: Tensor) -> bool:
    library = sys.modules.get("bitsandbytes")  # without it there are none
    return library is not None and isinstance(parameter, library.nn.Params4bit)


def _part(weight: nn.Parameter, path: tuple[str, ...]) -> nn.Parameter | None:
    """Returns a tensor of what a packed weight consists of, which becomes a parameter if it is none yet."""
    *before, name = path
    holder = _follow(weight, before)
    found = getattr(holder, name, None)
    if found is None:
        return None
    if not isinstance(found, nn.Parameter):
        found = nn.Parameter(found, requires_grad=False)
        setattr(holder, name, found)
    found.__dict__["_is_scale"] = True
    return found


def _follow(start: Any, path: Any) -> Any:
    for name in path:
        start = getattr(start, name, None)
    return start
