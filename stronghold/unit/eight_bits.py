"""Weights that bitsandbytes has quantised to eight bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.unit.packed_products import is_known, save_by_autograd
from stronghold.unit.quantised import Cell


class EightBits:
    """bitsandbytes' ``Int8Params``: whole numbers, and a scale for each row in the ``state`` of their module."""

    may_be_kept = True

    def has(self, parameter: Tensor) -> bool:
        library = sys.modules.get("bitsandbytes")  # without it there are none
        return library is not None and isinstance(parameter, library.nn.Int8Params)

    def moves_itself(self, parameter: Tensor) -> bool:
        return True

    def title(self, parameter: Tensor) -> str:
        return "in eight bits"

    def cells(self, module: nn.Module, parameter: Any) -> Iterator[Cell]:
        for holder in (module.state, parameter):  # it is the weight's until the first call
            if isinstance(getattr(holder, "SCB", None), Tensor):
                yield Cell("int8.SCB", holder, "SCB")
                return

    def settle(self, module: nn.Module, parameter: Any, device: torch.device) -> None:
        save_by_autograd(module)

    def check(
        self, name: str, module: nn.Module, parameter: Any, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        where = name.rpartition(".")[0] or "model"
        if not is_known(module):
            raise ValueError(
                f"weights in eight bits must be those of bitsandbytes' Linear8bitLt, with its own forward (got {name} "
                f"of a {type(module).__module__}.{type(module).__qualname__}); leave that module as it is in bf16"
            )
        state: Any = module.state
        if parameter.has_fp16_weights or state.has_fp16_weights:
            raise ValueError(
                f"a weight in eight bits must be quantised once, not in each step (got {name} with "
                "has_fp16_weights=True); build its module with has_fp16_weights=False"
            )
        if parameter.dtype != torch.int8:
            raise ValueError(
                f"a weight in eight bits must be quantised before it moves (got {name}, whose values are in "
                f"{parameter.dtype}); call {where}.to('cpu'), which quantises it, before offload()"
            )
        if parameter.CB is not None:
            scales = state.SCB  # of a weight that PEFT's DoRA has looked at they are here alone
            module.init_8bit_state()  # type: ignore[operator]
            state.SCB = scales if state.SCB is None else state.SCB
        state.CB = parameter  # its memory, wherever it is

    def unpacked(self, parameter: Any) -> Tensor:
        return torch.empty(parameter.shape, dtype=parameter.__dict__.get("_before", torch.float32), device="meta")

    def pack(self, parameter: Any, value: Tensor) -> Iterator[Tensor]:
        functional = sys.modules["bitsandbytes"].functional
        packed, scales, _ = functional.int8_vectorwise_quant(value.contiguous().to(torch.float16))
        yield packed
        yield scales

    def copy(self, parameter: Any, own: Any, memo: dict[int, Any]) -> nn.Parameter:
        copied: Any = own(parameter.detach().clone(), requires_grad=False, has_fp16_weights=False)
        memo[id(parameter)] = copied
        return copied  # type: ignore[no-any-return]
