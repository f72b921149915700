"""Host memory allocated to the byte, and shared out as tensors with storages of their own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class HostBuffer:
    """A flat piece of host memory: page-aligned, as long as asked for, never rounded up to a power of two.

    It is anonymous memory of its own rather than a torch allocation, so that it can be pinned where it lies
    (``torch.Tensor.pin_memory`` takes up to twice the size, pytorch #95823). The views have storages of their own:
    saving one tensor saves that tensor's bytes, and no library takes neighbours for tied weights.
    """

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._memory = mmap.mmap(-1, max(length_bytes, 1))
        self.flat = torch.frombuffer(self._memory, dtype=torch.uint8)[:length_bytes]
        self.pinned = False

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor of ``shape`` and ``dtype`` that lies at ``offset_bytes``."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset_bytes)
        return flat.view(shape).data  # not a view of ``flat``, which would live on as a second user of the storage
