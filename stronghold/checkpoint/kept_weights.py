"""Models whose files hold weights that are quantised already: their layers are made to hold these."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stronghold.checkpoint.quantising import in_eight_bits, in_four_bits, note_quantised, replace
from stronghold.formats.quantised_files import KeptWeight, QuantisedFiles
from stronghold.formats.tensor_files import DTYPES

METHODS = ("bitsandbytes", "torchao")
"""Whose weights are read, by transformers' ``quant_method``."""
_STORAGE = {name: dtype for dtype, name in DTYPES.items()}


def keep_quantised(model: nn.Module, files: QuantisedFiles, config: dict[str, Any]) -> None:
    """Replaces those linear layers of ``model``, on the meta device, whose weights ``files`` hold quantised.

    ``config`` is the ``quantization_config`` of its config.json, which transformers reads as a BitsAndBytesConfig or a
    TorchAoConfig: of the former it has what of a layer its weight does not tell. Raises ValueError for another method,
    and for weights that are not those of linear layers of the model, or of a class that torchao does not know;
    ModuleNotFoundError without the library.
    """
    method = config.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"quantised weights can be read where they are bitsandbytes' or torchao's (got {str(files.directory)!r}, "
            f"quantised by {method!r}); pass the model in float32 or bfloat16, and quantize="
        )
    for name, kept in files.kept.items():
        own = name.removesuffix(".weight")
        linear = _submodule(model, own)
        shape = kept.state.get("shape")
        if kept.parts and type(linear) is nn.Linear:
            weight = _subclass(files, name, kept)
            if weight.shape == linear.weight.shape:
                linear.weight = weight
                continue
            shape = [*weight.shape]
        if type(linear) is not nn.Linear or (shape and list(linear.weight.shape) != shape):
            raise ValueError(
                f"a quantised weight must be that of a linear layer of its shape (got {name} in "
                f"{str(files.directory)!r}, where {type(model).__name__} has a {type(linear).__name__}); build the "
                "model that it was saved from"
            )
        replace(model, [own], lambda linear, name=name, kept=kept: _made(linear, files, name, kept, config))  # type: ignore[misc]
    if method == "bitsandbytes":
        note_quantised(model, 8 if any(kept.kind == "int8" for kept in files.kept.values()) else 4)
    elif hasattr(model, "save_pretrained"):
        from stronghold.checkpoint.torchao_quantizer import note_torchao

        note_torchao(model, config)


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


def _subclass(files: QuantisedFiles, name: str, kept: KeptWeight) -> nn.Parameter:
    """Returns a weight of torchao's that lives on the CPU, as it will, of tensors on the meta device."""
    try:
        from torchao.prototype.safetensors.safetensors_utils import object_from_dict
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the weights in {str(files.directory)!r} are torchao's, which is not installed; pip install torchao"
        ) from error
    entries = {part: files.entries[there] for part, there in kept.parts.items()}
    number = {part: torch.zeros((), dtype=_STORAGE.get(entry.dtype), device="cpu") for part, entry in entries.items()}
    cells = {part: number[part].expand(entry.shape) for part, entry in entries.items()}
    try:
        made = object_from_dict({**kept.state, "_data": {**kept.state["_data"], **cells}})
    except (ValueError, TypeError, AttributeError) as error:  # of a class, or of arguments, that it does not know
        raise ValueError(
            f"a quantised weight must be of a class that the installed torchao knows (got {name} in "
            f"{str(files.directory)!r}, a {kept.kind}: {' '.join(str(error).split())[:200]}); install the torchao that "
            "it was saved with"
        ) from error
    weight = nn.Parameter(made, requires_grad=False)
    for part, value in cells.items():
        setattr(weight, part, value.to("meta"))
    return weight


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
