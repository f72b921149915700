"""What is asked of a parameter or its memory itself, past the class that it has outside the window."""

from __future__ import annotations

import torch
from torch import Tensor


def octets(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_octets(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one size have the same bits, not-a-numbers included."""
    return torch.equal(octets(one), octets(other))


def raw_version(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


def requires_grad(parameter: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad
