"""What transformers keeps in fp32 in a model of 16 bits, and leaves out where it quantises: routers, norms, biases."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.formats.adapter_names import base_of, modules_of_base


def keep_in_fp32(model: nn.Module) -> None:
    """Converts the 16-bit parameters and buffers of ``model`` that ``from_pretrained`` would have in fp32.

    They are those of ``state_dict()`` whose names the model's own list has, ``_keep_in_fp32_modules_strict``, with
    fp16 those of ``_keep_in_fp32_modules`` too. All stay the same objects, and what is fp32 stays as it is.
    """
    base: Any = base_of(model)
    if (plan_of := getattr(base, "_get_dtype_plan", None)) is None:
        return
    plans: dict[torch.dtype, dict[str, torch.dtype]] = {d: plan_of(d) for d in (torch.float16, torch.bfloat16)}

    def wanted(name: str, tensor: Tensor) -> torch.dtype | None:
        if type(tensor) not in (Tensor, nn.Parameter):  # one of a library that quantises
            return None
        plan = plans.get(tensor.dtype, {})
        return next((to for pattern, to in plan.items() if re.search(pattern.replace("*", ".*"), name)), None)

    for prefix, module in modules_of_base(base):
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or own in module._non_persistent_buffers_set:
                continue
            if (dtype := wanted(f"{prefix}.{own}" if prefix else own, tensor)) is not None:
                tensor.data = tensor.data.to(dtype)


def is_left_unquantised(model: nn.Module, name: str) -> bool:
    """Whether transformers leaves the module ``name`` as it is where it quantises, by ``_keep_in_fp32_modules``.

    A pattern holds from the beginning of a name to the end of one of its parts, or at its end
    (``transformers.quantizers.quantizers_utils.should_convert_module``).
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(key) for key in kept)
