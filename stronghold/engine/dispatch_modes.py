"""What the engine does around a layer's computation, which is no part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


def outside_modes(work: Callable[[], T]) -> T:
    """Returns ``work()``, of which no ``TorchDispatchMode`` of the user's sees an operation.

    Selective checkpointing is such a mode: its second run has to have the operations of the first one, in their order,
    and takes results that it kept in their place. What the engine copies, counts and looks at differs between the two.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return work()
    with _disable_current_modes():
        return work()
