"""A layer may have a checkpoint of its own, which computes with its weights again in the backward pass."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stronghold
from tests.gpu import DEVICE, needs_device

WIDTH, LAYERS, STEPS = 8, 4, 2


class Checkpointed(nn.Module):
    """A block whose weights are all within its checkpoint, or all but the norm's."""

    def __init__(self, *, whole: bool, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.whole, self.reentrant = whole, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return x + checkpoint(lambda y: self.mlp(self.norm(y)), x, use_reentrant=self.reentrant)
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Such layers behind a linear one."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Checkpointed(**how) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def compare(device: str, how: dict[str, bool], **settings: object) -> None:
    """Trains the model, and a copy that is wholly on the device, and compares losses and gradients to the bit."""
    torch.manual_seed(0)
    model = Stack(**how)
    plain = copy.deepcopy(model).to(device)
    stronghold.offload(model, device=device, **settings)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        loss, expected = model(x), plain(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad.cpu(), other.grad.cpu()), name
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        with torch.no_grad():  # the updates themselves are other tests'
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.copy_(one)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
def test_it_computes_on_the_cpu(whole: bool, reentrant: bool, activations: str, where: str, tmp_path: Path) -> None:
    store = {"store": f"disk:{tmp_path}"} if where == "disk" else {}
    compare("cpu", {"whole": whole, "reentrant": reentrant}, window=1, activations=activations, **store)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
def test_it_finds_weights_on_the_device(whole: bool, reentrant: bool, activations: str, window: int) -> None:
    """Autograd has saved no weight that lies in a checkpoint, and so nothing but the checkpoint asks for it."""
    compare(DEVICE, {"whole": whole, "reentrant": reentrant}, window=window, activations=activations)
