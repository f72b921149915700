"""What ``torch.compile`` makes of a model."""

from __future__ import annotations

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
