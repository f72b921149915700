"""Linear layers become bitsandbytes' in four or eight bits, on the meta device, before their values are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine.find_layers import find_layers
from stronghold.formats.kept_in_fp32 import is_left_unquantised

KINDS = ("nf4", "nf4_nested", "int8")
"""``nf4`` is Dettmers et al.'s (QLoRA, 2023), 0.5625 bytes per parameter; nested, with scales in eight bits, 0.516.

``int8`` is their LLM.int8() (2022): a byte per parameter, and 4 bytes per row of a weight.
"""
_BLOCK, _OUTER_BLOCK = 64, 256
_THRESHOLD = 6.0
"""From where on LLM.int8() computes with an input in 16 bits; transformers' default."""


def quantise(model: nn.Module, kind: str, *, layers: Any = None, dtype: torch.dtype | None = None) -> None:
    """Replaces the linear layers in the layers of ``model``, on the meta device; four bits compute in ``dtype``.

    What they will hold is what ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` makes of the same
    weights, with ``bnb_4bit_use_double_quant`` for ``"nf4_nested"``, or ``load_in_8bit=True`` for ``"int8"``: what the
    model names in ``_keep_in_fp32_modules`` stays as it is. Raises ValueError for another kind, and where there is
    nothing to quantise; ModuleNotFoundError without bitsandbytes.
    """
    if kind not in KINDS:
        known = f"{', '.join(map(repr, KINDS[:-1]))} or {KINDS[-1]!r}"
        raise ValueError(f"quantize must be {known} (got {kind!r}); pass one of them, or None")
    found = [
        name
        for layer in find_layers(model, layers)
        for name, module in layer.module.named_modules(prefix=layer.name)
        if type(module) is nn.Linear and not is_left_unquantised(model, name)
    ]
    if not found:
        raise ValueError(
            f"quantize needs linear layers (torch.nn.Linear) in the layers of the model (got a {type(model).__name__} "
            "without); leave it out"
        )
    if kind == "int8":
        replace(model, found, lambda linear: in_eight_bits(linear, dtype=dtype))
    else:
        replace(model, found, lambda linear: in_four_bits(linear, nested=kind == "nf4_nested", dtype=dtype))
    note_quantised(model, 8 if kind == "int8" else 4)
    if (config := getattr(model, "config", None)) is not None:
        left = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        config.quantization_config = _config(kind, dtype or config.dtype, left)


def _config(kind: str, dtype: torch.dtype, left: list[str]) -> dict[str, Any]:
    """Returns what config.json says of such a model, which ``model.save_pretrained`` writes; ``left`` are as before."""
    common: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": left}
    if kind == "int8":
        return {**common, "load_in_8bit": True, "llm_int8_threshold": _THRESHOLD}
    return {
        **common,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": kind == "nf4_nested",
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
    }


def note_quantised(model: nn.Module, bits: int) -> None:
    """Notes as transformers does that the weights of ``model`` are in so many bits; PEFT chooses its layers by that."""
    model.__dict__[f"is_loaded_in_{bits}bit"] = True


def replace(model: nn.Module, names: list[str], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts what ``make`` returns for them in the place of the linear layers of these ``names``."""
    for name in names:
        parent, _, own = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        made = make(linear)
        made.bias = linear.bias
        made.train(linear.training)
        setattr(model.get_submodule(parent), own, made)


def in_eight_bits(linear: nn.Linear, *, dtype: torch.dtype | None = None, threshold: float = _THRESHOLD) -> nn.Module:
    """Returns bitsandbytes' layer in eight bits of the same shape; values are rounded to ``dtype`` before they are."""
    library = _bitsandbytes()
    made: Any = library.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=False,
        has_fp16_weights=False,
        threshold=threshold,
        device="meta",
    )
    whole = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
    made.weight = library.nn.Int8Params(whole, requires_grad=False, has_fp16_weights=False)
    made.weight.__dict__["_before"] = dtype or linear.weight.dtype
    made.state.SCB = torch.empty(linear.out_features, dtype=torch.float32, device="meta")
    return made  # type: ignore[no-any-return]


def in_four_bits(
    linear: nn.Linear,
    *,
    nested: bool,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    kind: str = "nf4",
    block: int = _BLOCK,
    outer_block: int = _OUTER_BLOCK,
    codes: tuple[Tensor, ...] = (),
    storage: torch.dtype = torch.uint8,
) -> nn.Module:
    """Returns bitsandbytes' layer in four bits of the same shape.

    Args:
        linear: What it takes the place of.
        nested: Whether its scales are in eight bits, with scales of their own.
        dtype: That of the values before they are quantised, and after; by default the weight's own.
        compute_dtype: That in which it computes; by default ``dtype``.
        kind: "nf4" or "fp4".
        block: So many values have a scale in common.
        outer_block: So many scales have one.
        codes: The values that four bits stand for, and with ``nested`` those of a scale's eight; by default
            bitsandbytes' own.
        storage: The dtype as which the bytes are kept.
    """
    library = _bitsandbytes()
    functional = library.functional
    dtype = dtype or linear.weight.dtype
    blocks = -(-linear.weight.numel() // block)
    scales = torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32, device="meta")
    code = codes[0] if codes else functional.get_4bit_type(kind, device="cpu")
    outer = None
    if nested:
        outer = functional.QuantState(
            absmax=torch.empty(-(-blocks // outer_block), dtype=torch.float32, device="meta"),
            code=codes[1] if codes else functional.create_dynamic_map().to("cpu"),
            blocksize=outer_block,
            dtype=torch.float32,
        )
    state = functional.QuantState(
        absmax=scales,
        shape=linear.weight.shape,
        code=code,
        blocksize=block,
        quant_type=kind,
        dtype=dtype,
        offset=torch.empty((), dtype=torch.float32, device="meta") if nested else None,
        state2=outer,
    )
    made: Any = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=compute_dtype or dtype,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
        device="meta",
    )
    packed = -(-linear.weight.numel() // (2 * storage.itemsize))
    made.weight = library.nn.Params4bit(
        torch.empty((packed, 1), dtype=storage, device="meta"),
        quant_state=state,
        blocksize=block,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
        module=made,
        bnb_quantized=True,
    )
    made.quant_state = state
    return made  # type: ignore[no-any-return]


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "weights in four or eight bits are bitsandbytes', which is not installed; pip install bitsandbytes"
        ) from error
    return bitsandbytes
