"""A model that nobody has made settings for, planned and moved at its first training pass on a GPU."""

from __future__ import annotations

import pytest
import torch

import stronghold
from stronghold.engine import engine_of
from stronghold.lab.models.gpt import GPT, GPTConfig
from tests.crossed import crossed
from tests.gpu import DEVICE, needs_device
from tests.planner.machines import machine

pytestmark = [pytest.mark.gpu, needs_device]

SHAPE = GPTConfig(layers=5, hidden=64, heads=4, sequence=32, vocabulary=97, dropout=0.1)
ALL, SOME, FEW = 2**30, 13 * 2**18, 6 * 2**18
"""Bytes of devices that hold all layers, some beside a window, and none."""


def gpt():
    torch.manual_seed(0)
    return GPT(SHAPE)


def trained(model, optimizer):
    """Returns the losses of an evaluation and four steps, and the parameters behind them, on the CPU."""
    generator, losses = torch.Generator().manual_seed(1), []
    batches = [torch.randint(0, SHAPE.vocabulary, (1, 32), generator=generator).to(DEVICE) for _ in range(4)]
    model.eval()
    with torch.no_grad():
        losses.append(model(batches[0], labels=batches[0]).loss.item())
    model.train()
    for tokens in batches:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("memory_bytes", "dtype", "update", "states"),
    crossed(
        [ALL, SOME, FEW],
        [torch.float32, torch.bfloat16],
        ["deferred", "in_backward"],
        ["fp32", "8bit"],
        together=1,
    ),
)
def test_bits_are_those_of_a_model_that_was_offloaded_so(monkeypatch, memory_bytes, dtype, update, states):
    there = machine(device_memory_bytes=memory_bytes)
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: there)
    model = stronghold.offload(gpt(), device=DEVICE, dtype=dtype)
    ours = trained(model, stronghold.AdamW(model.parameters(), update=update, states=states))
    report = stronghold.report(model)
    assert report.planned is not None
    assert (report.resident == SHAPE.layers) == (memory_bytes == ALL) or states == "8bit"
    kept = sum(block.keep for block in engine_of(model).blocks)
    settings = {"window": max(1, report.window), "resident": report.resident, "activations": kept}
    other = stronghold.offload(gpt(), device=DEVICE, dtype=dtype, **settings)
    theirs = trained(other, stronghold.AdamW(other.parameters(), update=update, states=states))
    assert ours[0] == theirs[0]
    for one, its in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(one, its)
    expected = stronghold.report(other)
    for name in ("slots", "gradients", "root", "resident"):
        assert getattr(report, f"{name}_device_bytes") == getattr(expected, f"{name}_device_bytes"), name
    assert report.pinned_host_bytes == expected.pinned_host_bytes
    assert report.pageable_host_bytes == expected.pageable_host_bytes
