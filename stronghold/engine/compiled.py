"""What ``torch.compile`` makes of a model."""

from __future__ import annotations

import warnings

from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile(module)`` stands for, or ``model`` itself.

    It has the parameters under their own names, which the other one's begin with ``_orig_mod``.
    """
    if "_orig_mod" in model._modules:
        from torch._dynamo import OptimizedModule  # which takes a while to import, and is there if one is

        while isinstance(model, OptimizedModule):
            model = model._orig_mod
    return model


def warn_of_compiling(kind: str) -> None:
    """Warns that a model of ``kind`` is compiled, or a layer or caller of it, whose layers run as they are."""
    warnings.warn(
        "torch.compile leaves the layers of an offloaded model as they are, for their parameters move while they run, "
        f"which a graph cannot follow (got a compiled {kind}, or a layer or caller of it). They run eagerly, exactly "
        "and no faster; to compile what is inside of a layer, set layer.forward = torch.compile(layer.forward) before "
        "offload()",
        stacklevel=3,
    )
