"""What an operator costs beside its work: what the least of them takes of a device, and issuing one of the host.

Where the host computes, that is what calling one takes, with the modules around it and the views between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stronghold.probing.rounds import Key, Measure
from stronghold.probing.stopwatches import DeviceClock

CHAIN = 32
"""Numbers that a chain of small operators multiplies."""
CHAIN_CALLS = 3 * (CHAIN - 1) + 1
"""Its operators: a product of each, two in the backward pass, and the ones that it begins with."""
LAYER_OPS, BACKWARD_OPS = 10, 20
"""Operators of :class:`IssuedLayer`'s passes that compute: what is none but another view of a tensor does not count."""


def call_measures(clock: DeviceClock) -> list[Measure]:
    """Returns what is to be measured: seconds by ("op_s",), ("launch_s",) and ("host_call_s",)."""
    device = clock.device.torch_device
    on_device, on_host = chain(device), chain(torch.device("cpu"))
    layer, x = IssuedLayer().to(device), torch.zeros(1, 4, 16, device=device, requires_grad=True)

    inputs, gradient = [x, *layer.parameters()], torch.ones_like(x)

    def passes() -> None:
        torch.autograd.grad(layer(x), inputs, gradient)

    def op_s() -> float:
        if clock.device.is_host:  # of which a chain's operators, all alike, take a quarter or less
            return clock.timed(passes, calls=4) / (LAYER_OPS + BACKWARD_OPS)
        return clock.timed(on_device, calls=2) / CHAIN_CALLS

    def sample() -> Mapping[Key, float]:
        with torch.enable_grad():
            return {
                ("op_s",): op_s(),
                # A pass of the step model issues the operators of a layer's forward pass: this is a mean of both.
                ("launch_s",): clock.issued(passes, calls=4) / 2 / LAYER_OPS,
                ("host_call_s",): clock.issued(on_host, calls=4) / CHAIN_CALLS,
            }

    return [Measure("calls", sample)]


def chain(device: torch.device) -> Callable[[], object]:
    """Returns small products on ``device`` one after the other, through autograd."""
    factors = [torch.ones(64, device=device, requires_grad=True) for _ in range(CHAIN)]

    def task() -> None:
        x = factors[0]
        for factor in factors[1:]:
            x = x * factor
        torch.autograd.grad(x, factors, torch.ones_like(x))

    return task


class IssuedLayer(nn.Module):
    """A transformer's layer that is next to no work: what it takes is what its modules and operators cost to call."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out_of = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.into(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out_of(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm(x))))
