"""Convolutions in PyTorch's channels_last: the bits that they have without an offloaded model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stronghold


class Convolutions(nn.Module):
    """Residual blocks of a convolution each, and a head over their means."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


def learned(*, inputs: torch.memory_format, offloaded: dict[str, object] | None = None) -> tuple[list[float], Tensor]:
    """Returns the losses of five steps and the last layer's weights."""
    torch.manual_seed(0)
    model = Convolutions().to(memory_format=torch.channels_last)
    x = torch.randn(4, 12, 10, 10).to(memory_format=inputs)
    if offloaded is not None:
        model = stronghold.offload(model, device="cpu", **offloaded)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for _ in range(5):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.layers[-1][0].weight.detach().clone()


@pytest.mark.parametrize("on_disk", [False, True], ids=["ram", "disk"])
@pytest.mark.parametrize("window", [1, 3])
def test_with_inputs_in_channels_last_every_bit_is_plain_pytorchs(tmp_path, window, on_disk):
    placed = {"window": window, **({"store": tmp_path} if on_disk else {})}
    expected, weight = learned(inputs=torch.channels_last)
    losses, found = learned(inputs=torch.channels_last, offloaded=placed)
    assert losses == expected
    assert torch.equal(found, weight)


def test_with_other_inputs_weights_that_have_become_contiguous_differ_by_rounding():
    expected, _ = learned(inputs=torch.contiguous_format)
    losses, _ = learned(inputs=torch.contiguous_format, offloaded={"window": 2})
    assert losses == pytest.approx(expected, rel=1e-5)
