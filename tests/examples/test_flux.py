"""The Flux-shaped example: two rows of blocks train as the plain model does, and no placement changes a bit."""

from __future__ import annotations

import pytest
import torch

import stronghold
from tests.documented import example

flux = example("flux")
SIZES = {"double": 2, "single": 3, "size": 32, "axes": (4, 6, 6)}
ADAMW = {"lr": 2e-3, "weight_decay": 0.01}


def build():
    torch.manual_seed(0)
    return flux.Flux(**SIZES)


def losses_of(model, optimizer, steps=6, dtype=torch.float32, after=lambda: None):
    given, generator = flux.batch("cpu", dtype, samples=4), torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = flux.flow_matching_loss(model, generator=generator, **given)
        loss.backward()
        optimizer.step()
        after()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Masters:
    """What exact masters are, written with torch alone: fp32 copies are updated, and rounded to the weights."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, **ADAMW)

    def step(self):
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
        self.adamw.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.data.copy_(master)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


@pytest.fixture(scope="module")
def in_bf16():
    """The losses with moments in eight bits, of the example's settings."""
    return bf16("8bit", window=2, activations="host")


def bf16(states, update="in_backward", **settings):
    model = stronghold.offload(build(), device="cpu", dtype=torch.bfloat16, **settings)
    found = losses_of(
        model, stronghold.AdamW(model.parameters(), states=states, update=update, **ADAMW), dtype=torch.bfloat16
    )
    stronghold.close(model)
    return found


@pytest.fixture(scope="module")
def in_fp32():
    """The losses of the plain model."""
    plain = build()
    return losses_of(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), steps=12)


@pytest.mark.parametrize(
    "window", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(5, marks=pytest.mark.long)]
)
def test_in_fp32_losses_are_those_of_the_plain_model(in_fp32, window):
    model = stronghold.offload(build(), device="cpu", window=window, activations="host")
    assert [layer.name for layer in stronghold.engine.engine_of(model).layers] == [
        *(f"double_blocks.{n}" for n in range(2)),
        *(f"single_blocks.{n}" for n in range(3)),
    ]
    got = losses_of(model, stronghold.AdamW(model.parameters(), **ADAMW), steps=12)
    assert got == pytest.approx(in_fp32, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"window": 1}, marks=pytest.mark.long),
        {"window": 5},
        {"window": 2, "resident": 2},
        {"window": 1, "disk": 1},
    ],
)
def test_in_bf16_no_placement_changes_a_bit(in_bf16, settings, tmp_path):
    if settings.pop("disk", 0):
        settings |= {"store": tmp_path, "activations": "disk"}
    assert bf16("8bit", **settings) == in_bf16


def test_in_bf16_losses_are_those_of_exact_masters(in_bf16):
    """Those with moments in fp32 to rounding of weights, those in eight bits to what docs/formats.md says of them."""
    plain = build().to(torch.bfloat16)
    expected = losses_of(plain, Masters(plain), dtype=torch.bfloat16)
    exact = bf16("fp32", update="deferred", window=2)
    assert in_bf16[0] == exact[0] == expected[0]
    assert exact == pytest.approx(expected, rel=1e-3)
    assert in_bf16 == pytest.approx(expected, rel=1e-2)


def test_what_it_holds_is_six_bytes_per_parameter():
    torch.manual_seed(0)
    model = flux.Flux(double=2, single=4, size=192, axes=(16, 24, 24))
    stronghold.offload(model, device="cpu", window=1, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), states="8bit", update="in_backward")
    assert optimizer.in_backward
    report = stronghold.report(model)
    units = stronghold.engine.engine_of(model).units
    streamed = sum(unit.elements for unit in units)
    staging = 2 * max(unit.gradients.layout.total_bytes for unit in units if not unit.is_root)
    kept = sum(unit.gradients.layout.total_bytes for unit in units if unit.is_root and unit.has_device_copy)
    assert (report.host_bytes - staging - kept) / streamed == pytest.approx(6.03, abs=0.03)
