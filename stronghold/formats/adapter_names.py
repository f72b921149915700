"""The names that a model's tensors have in the files of a base, whatever adapters of PEFT are around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn


def base_of(model: nn.Module) -> nn.Module:
    """Returns the model that a PeftModel is around, or ``model`` itself."""
    peft = sys.modules.get("peft")  # without it there is none
    if peft is not None and isinstance(model, peft.PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model


def modules_of_base(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a base, under every name of theirs, by the names that they had before adapters came.

    What an adapter is around has the adapter's name then; what belongs to the adapter has names below it.
    """
    peft = sys.modules.get("peft")
    around = () if peft is None else (peft.tuners.tuners_utils.BaseTunerLayer,)

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                same = name == "base_layer" and isinstance(module, around)
                yield from walk(prefix if same else f"{prefix}.{name}" if prefix else name, child)

    return walk("", model)
