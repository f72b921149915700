"""Quantised weights compute from slots on a device with memory of its own, and no copy races with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.gpu import DEVICE, SOFT, needs_device

pytestmark = [pytest.mark.gpu, needs_device]
WIDTH = 64


class Scaled(nn.Module):
    """A frozen layer with one trained parameter, whose last operation is a frozen product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x * (1 + self.scale))))
        return down


def built(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    if kind == "int8":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    else:
        modules = pytest.importorskip("bitsandbytes.nn")
        for layer in model:
            for name in ("up", "down"):
                linear = modules.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32)
                value = getattr(layer, name).weight.data
                linear.weight = modules.Params4bit(value, quant_type="nf4", compress_statistics=True, module=linear)
                linear.support_avx512bf16_for_cpu = False
                setattr(layer, name, linear.to("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("scale"))
    return model


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Where bitsandbytes has no kernels for a device, it compiles its own for minutes, and then does without."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_are_those_of_a_model_whose_layers_are_all_in_slots(kind: str) -> None:
    x = torch.randn(3, WIDTH)
    places: list[dict[str, Any]] = [{"window": 4}, {"window": 1}, {"window": 2}]
    places += [{"window": 2, "activations": "keep"}] if kind == "nf4" else []
    rows = []
    for place in places:
        model = stronghold.offload(built(kind), device=DEVICE, **place)
        losses = _learn(model, x)
        rows.append([*losses, *(layer.scale.grad.cpu() for layer in model)])
    if SOFT is not None:  # it computes as the CPU does
        model = built(kind)
        rows.append([*_learn(model, x, "cpu"), *(layer.scale.grad for layer in model)])
    assert all(value.any() for value in rows[0])
    for row in rows[1:]:
        for mine, theirs in zip(row, rows[0], strict=True):
            assert torch.equal(mine, theirs)


def _learn(model: nn.Module, x: Tensor, device: str = DEVICE) -> list[Tensor]:
    losses = []
    for part in (x, 2 * x):
        loss = model(part.to(device)).square().sum()
        loss.backward()
        losses.append(loss.detach().cpu())
    return losses
