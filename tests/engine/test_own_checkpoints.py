"""A layer may have a checkpoint of its own, which computes with its weights again in the backward pass."""

from __future__ import annotations

import copy
import functools
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


class Early(nn.Module):
    """Layers that return all outputs of those before as well, of which the loss is the first one's."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Checkpointed(whole=True, reentrant=False) for _ in range(LAYERS))
        for layer in self.layers:
            layer.forward = functools.partial(self.one, layer, own)

    @staticmethod
    def one(layer: Checkpointed, own: bool, x: Tensor, *earlier: Tensor) -> tuple[Tensor, ...]:
        y = checkpoint(layer.mlp, x, use_reentrant=False) if own else layer.mlp(x)
        return x + y, x, *earlier

    def forward(self, x: Tensor) -> Tensor:
        outputs = (x,)
        for layer in self.layers:
            outputs = layer(*outputs)
        return outputs[LAYERS - 1].square().mean()


def fetched(device: str, *, own: bool, window: int) -> int:
    """Returns how many layers a step fetches: all, one whose gradients the loss needs, and the next step's window."""
    torch.manual_seed(0)
    model = Early(own=own)
    plain = copy.deepcopy(model).to(device)
    stronghold.offload(model, device=device, window=window, activations="keep")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    for one in (model, plain):
        one(x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad.cpu(), other.grad.cpu())
    optimizer.step()
    report = stronghold.report(model)
    assert report.step is not None
    return report.step.fetches


@pytest.mark.parametrize("window", [1, 2])
def test_a_layer_that_returns_its_inputs_is_not_asked_for_with_them(window: int) -> None:
    assert fetched("cpu", own=False, window=window) == LAYERS + 1 + window
    assert fetched("cpu", own=True, window=window) == LAYERS + 1 + window


@pytest.mark.gpu
@needs_device
def test_a_checkpoint_behind_which_layers_return_it_finds_its_weights() -> None:
    assert fetched(DEVICE, own=True, window=1) == LAYERS + 2
