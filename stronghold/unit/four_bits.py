"""Weights that bitsandbytes has packed into four bits."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.unit.packed_products import is_known, save_by_autograd
from stronghold.unit.quantised import Cell, follow

_CELLS = {
    "absmax": ("quant_state", "absmax"),
    "nested_absmax": ("quant_state", "state2", "absmax"),
    "nested_offset": ("quant_state", "offset"),
}
"""What moves beside the bytes, by the names that bitsandbytes saves it under: a scale for each block."""
_CONSTANTS = (("quant_state", "code"), ("quant_state", "state2", "code"))


class FourBits:
    """bitsandbytes' ``Params4bit``: packed bytes, and scales in their ``quant_state``."""

    may_be_kept = True

    def has(self, parameter: Tensor) -> bool:
        library = sys.modules.get("bitsandbytes")  # without it there are none
        return library is not None and isinstance(parameter, library.nn.Params4bit)

    def moves_itself(self, parameter: Tensor) -> bool:
        return True

    def title(self, parameter: Tensor) -> str:
        return "in four bits"

    def cells(self, module: nn.Module, parameter: Any) -> Iterator[Cell]:
        kind = getattr(parameter.quant_state, "quant_type", None)
        for own, (*path, name) in _CELLS.items():
            if isinstance(getattr(holder := follow(parameter, tuple(path)), name, None), Tensor):
                yield Cell(f"{kind}.{own}", holder, name)

    def settle(self, module: nn.Module, parameter: Any, device: torch.device) -> None:
        for *path, name in _CONSTANTS:
            if isinstance(tensor := getattr(holder := follow(parameter, tuple(path)), name, None), Tensor):
                setattr(holder, name, tensor.to(device))
        if is_known(module):  # else it looks its rows up, and needs no gradient
            save_by_autograd(module)

    def check(
        self, name: str, module: nn.Module, parameter: Any, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        if getattr(parameter, "quant_state", None) is None:
            raise ValueError(
                f"a weight in four bits must be quantised before it moves (got {name}, whose values are in "
                f"{parameter.dtype}); call {name.rpartition('.')[0] or 'model'}.to('cpu'), which packs it, before "
                "offload()"
            )
        if not is_known(module) and not isinstance(module, nn.Embedding):
            raise ValueError(
                f"weights in four bits must be those of bitsandbytes' Linear4bit, with its own forward (got {name} of "
                f"a {type(module).__module__}.{type(module).__qualname__}); leave that module as it is in bf16"
            )
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # For evaluation on some processors it would repack the bytes.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]

    def unpacked(self, parameter: Any) -> Tensor:
        state = parameter.quant_state
        return torch.empty(state.shape, dtype=state.dtype, device="meta")

    def pack(self, parameter: Any, value: Tensor) -> Iterator[Tensor]:
        functional, state = sys.modules["bitsandbytes"].functional, parameter.quant_state
        packed, found = functional.quantize_4bit(
            value.contiguous(),
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=parameter.quant_storage,
        )
        yield packed
        yield found.absmax
        if state.nested:
            yield found.state2.absmax
            yield found.offset

    def copy(self, parameter: Any, own: Any, memo: dict[int, Any]) -> nn.Parameter:
        copied: Any = own.__new__(own)
        memo[id(parameter)] = copied
        state = own.__getstate__(parameter)
        copied.__setstate__({**state, "data": parameter.detach().clone()})
        copied.quant_state = copy.deepcopy(state["quant_state"], memo)
        return copied  # type: ignore[no-any-return]
