"""Models whose files hold weights that bitsandbytes has quantised already: their layers are made to hold these."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stronghold.checkpoint.quantising import in_eight_bits, in_four_bits, note_quantised, replace
from stronghold.formats.quantised_files import KeptWeight, QuantisedFiles
from stronghold.formats.tensor_files import DTYPES

_STORAGE = {name: dtype for dtype, name in DTYPES.items()}


def keep_quantised(model: nn.Module, files: QuantisedFiles, config: dict[str, Any]) -> None:
    """Replaces those linear layers of ``model``, on the meta device, whose weights ``files`` hold quantised.

    ``config`` is the ``quantization_config`` of its config.json, which transformers reads as a BitsAndBytesConfig: it
    has what of a layer its weight does not tell. Raises ValueError for another method, and for weights that are not
    those of linear layers of the model.
    """
    method = config.get("quant_method")
    if method != "bitsandbytes":
        raise ValueError(
            f"quantised weights can be read where they are bitsandbytes' (got {str(files.directory)!r}, quantised by "
            f"{method!r}); pass the model in float32 or bfloat16, and quantize="
        )
    for name, kept in files.kept.items():
        own = name.removesuffix(".weight")
        linear = _submodule(model, own)
        if type(linear) is not nn.Linear or (kept.state and list(linear.weight.shape) != kept.state["shape"]):
            raise ValueError(
                f"a quantised weight must be that of a linear layer of its shape (got {name} in "
                f"{str(files.directory)!r}, where {type(model).__name__} has a {type(linear).__name__}); build the "
                "model that it was saved from"
            )
        replace(model, [own], lambda linear, name=name, kept=kept: _made(linear, files, name, kept, config))  # type: ignore[misc]
    note_quantised(model, 8 if any(kept.kind == "int8" for kept in files.kept.values()) else 4)


def _made(linear: nn.Linear, files: QuantisedFiles, name: str, kept: KeptWeight, config: dict[str, Any]) -> nn.Module:
    if kept.kind == "int8":
        return in_eight_bits(linear, threshold=float(config.get("llm_int8_threshold", 6.0)))
    state = kept.state
    return in_four_bits(
        linear,
        nested=kept.nested,
        dtype=getattr(torch, state["dtype"]),
        compute_dtype=getattr(torch, config.get("bnb_4bit_compute_dtype") or "float32"),
        kind=kept.kind,
        block=int(state["blocksize"]),
        outer_block=int(state.get("nested_blocksize", 256)),
        codes=kept.codes,
        storage=_STORAGE[files.entries[name].dtype],
    )


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
