"""Products in bf16 on a processor that has none: PyTorch then takes many times as long for them as in fp32."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from functools import cache

import torch

from stronghold.device.device import Device

ROWS, SIZE = 32, 256
"""Of the product that is timed: its 4 M operations take 8 ms at the slowest that was seen, 0.5 GFLOP/s."""
SLOW = 4.0
"""So many times as long is told. A processor with AVX-512 and without bf16 takes up to twice as long."""


@cache
def times_as_long() -> float:
    """Returns how many times as long the gradient of a linear layer's input takes in bf16 as in fp32, on the CPU."""

    def least_s(dtype: torch.dtype) -> float:
        gradient = torch.ones(ROWS, SIZE, dtype=dtype, device="cpu")
        weight = torch.ones(SIZE, SIZE, dtype=dtype, device="cpu")
        found = []
        for _ in range(3):
            begin_s = time.perf_counter()
            torch.mm(gradient, weight)
            found.append(time.perf_counter() - begin_s)
        return min(found)

    return least_s(torch.bfloat16) / least_s(torch.float32)


@cache
def _tell(times: float) -> None:
    warnings.warn(
        f"this processor has no products in bf16: the one of a backward pass took {times:.0f} times as long as in fp32 "
        "(got layers that compute in torch.bfloat16 on the CPU); pass dtype=torch.float32 to offload() or load(). It "
        "takes 4 bytes for each parameter that is frozen instead of 2, and no more for those that are trained",
        RuntimeWarning,
        stacklevel=5,
    )


def tell_of_slow_products(dtypes: Iterable[torch.dtype], device: Device) -> None:
    """Warns, once in a process, where layers compute in bf16 on a CPU that is slow at it."""
    if device.is_host and torch.bfloat16 in dtypes and (times := times_as_long()) > SLOW:
        _tell(times)
