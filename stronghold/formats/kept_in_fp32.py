"""What transformers keeps in fp32 in a model of 16 bits, and leaves out where it quantises: routers, norms, biases."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.formats.adapter_names import base_of, modules_of_base

_MARK = "_is_kept_in_fp32"


def keep_in_fp32(model: nn.Module) -> None:
    """Converts the 16-bit parameters and buffers of ``model`` that ``from_pretrained`` would have in fp32.

    They are those of ``state_dict()`` whose names the model's own list has, ``_keep_in_fp32_modules_strict``, with
    fp16 those of ``_keep_in_fp32_modules`` too. All stay the same objects, and what is fp32 stays as it is.
    """
    in_fp16, in_bf16 = (_named(model, dtype) for dtype in (torch.float16, torch.bfloat16))
    for tensor in [t for t in in_fp16 if t.dtype is torch.float16] + [t for t in in_bf16 if t.dtype is torch.bfloat16]:
        tensor.data = tensor.data.to(torch.float32)


def mark_kept_in_fp32(model: nn.Module) -> None:
    """Has :func:`computes_in` know what the model's own list names, in ``model`` and in parts that have no list.

    It marks the parameters, which are the same objects in the stages that ``model`` is cut into.
    """
    for tensor in _named(model, torch.bfloat16):
        if isinstance(tensor, nn.Parameter):
            tensor.__dict__[_MARK] = True


def computes_in(parameter: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """Returns what a parameter computes in where its model is to compute in ``wanted``, None for each in its own.

    It is what ``from_pretrained(dtype=wanted)`` would have: with bf16 an fp32 parameter that is marked stays fp32.
    """
    if wanted is None or (wanted is torch.bfloat16 and parameter.dtype is torch.float32 and _MARK in vars(parameter)):
        return parameter.dtype
    return wanted


def _named(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Returns the parameters and buffers of ``state_dict()`` that transformers has in fp32 in a model of ``dtype``."""
    base: Any = base_of(model)
    plan: dict[str, torch.dtype] = getattr(base, "_get_dtype_plan", lambda _: {})(dtype)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern, to in plan.items() if to is torch.float32]
    if not patterns:
        return []
    return [
        tensor
        for prefix, module in modules_of_base(base)
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
        and own not in module._non_persistent_buffers_set
        and type(tensor) in (Tensor, nn.Parameter)  # no other one: of a library that quantises
        and any(pattern.search(f"{prefix}.{own}" if prefix else own) for pattern in patterns)
    ]


def is_left_unquantised(model: nn.Module, name: str) -> bool:
    """Whether transformers leaves the module ``name`` as it is where it quantises, by ``_keep_in_fp32_modules``.

    A pattern holds from the beginning of a name to the end of one of its parts, or at its end
    (``transformers.quantizers.quantizers_utils.should_convert_module``).
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(key) for key in kept)
