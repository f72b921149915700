"""Layers that take a known time."""

from __future__ import annotations

from time import sleep
from typing import Any

import torch
from torch import Tensor, nn


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sleep(ctx.backward_s)
        return gradients[0], None, None


class Waiting(nn.Module):
    """Scales its input, and waits for so many milliseconds in each pass; counts how often it was computed."""

    computed = 0

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.waits_s = (forward_ms / 1000, backward_ms / 1000)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        Waiting.computed += 1
        return _Wait.apply(x * self.scale, *self.waits_s)
