"""What an optimizer of any library holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def held_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Returns what the states of an optimizer take (on the host, on devices)."""
    host = device = 0
    seen = set()
    for tensor in _tensors(optimizer.state.values()):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            host += storage.nbytes() if tensor.is_cpu else 0
            device += 0 if tensor.is_cpu else storage.nbytes()
    return host, device


def name_of(optimizer: Optimizer) -> str:
    """Returns what the user knows an optimizer by."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            yield from _tensors(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
