"""Linear layers become bitsandbytes' in four bits, on the meta device, before their values are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stronghold.engine.find_layers import find_layers

KINDS = ("nf4", "nf4_nested")
"""``nf4`` is Dettmers et al.'s (QLoRA, 2023), 0.5625 bytes per parameter; nested, with scales in eight bits, 0.516."""
_BLOCK, _OUTER_BLOCK = 64, 256


def quantise(model: nn.Module, kind: str, *, layers: Any = None, dtype: torch.dtype | None = None) -> None:
    """Replaces the linear layers in the layers of ``model``, on the meta device; they compute in ``dtype``.

    What they will hold is what ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` makes of the same
    weights, with ``bnb_4bit_use_double_quant`` for ``"nf4_nested"``. Raises ValueError for another kind, and where
    there is nothing to quantise; ModuleNotFoundError without bitsandbytes.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize must be {' or '.join(map(repr, KINDS))} (got {kind!r}); pass one of them, or None")
    replaced = 0
    for layer in find_layers(model, layers):
        for module in [*layer.module.modules()]:
            for name, child in [*module.named_children()]:
                if type(child) is nn.Linear:
                    setattr(module, name, _packed(child, nested=kind == "nf4_nested", dtype=dtype))
                    replaced += 1
    if not replaced:
        raise ValueError(
            f"quantize needs linear layers (torch.nn.Linear) in the layers of the model (got a {type(model).__name__} "
            "without); leave it out"
        )
    model.__dict__["is_loaded_in_4bit"] = True  # as transformers notes it: by this PEFT chooses its own layers


def _packed(linear: nn.Linear, *, nested: bool, dtype: torch.dtype | None) -> nn.Module:
    try:
        import bitsandbytes
        from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "weights in four bits are bitsandbytes', which is not installed; pip install bitsandbytes"
        ) from error
    dtype = dtype or linear.weight.dtype
    blocks = -(-linear.weight.numel() // _BLOCK)
    scales = torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32, device="meta")
    outer = None
    if nested:
        outer = QuantState(
            absmax=torch.empty(-(-blocks // _OUTER_BLOCK), dtype=torch.float32, device="meta"),
            code=create_dynamic_map().to("cpu"),
            blocksize=_OUTER_BLOCK,
            dtype=torch.float32,
        )
    state = QuantState(
        absmax=scales,
        shape=linear.weight.shape,
        code=get_4bit_type("nf4", device="cpu"),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty((), dtype=torch.float32, device="meta") if nested else None,
        state2=outer,
    )
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=dtype,
        compress_statistics=nested,
        quant_type="nf4",
        device="meta",
    )
    made.weight = bitsandbytes.nn.Params4bit(
        torch.empty(((linear.weight.numel() + 1) // 2, 1), dtype=torch.uint8, device="meta"),
        quant_state=state,
        blocksize=_BLOCK,
        compress_statistics=nested,
        quant_type="nf4",
        module=made,
        bnb_quantized=True,
    )
    made.quant_state = state
    made.bias = linear.bias
    made.train(linear.training)
    return made
