"""What ``torch.compile`` is not to look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

C = TypeVar("C", bound=Callable)


def opaque(function: C) -> C:
    """Keeps ``function``, and all that it calls, out of compiled graphs: they break here, and it runs as written.

    What it does to memory (waits for an update, moves a layer, notes a write) has to happen in each call, where a graph
    would have it happen once, while it is traced. Unlike ``torch.compiler.disable`` this does not import the compiler.
    """
    return cast(C, torch._disable_dynamo(function))
