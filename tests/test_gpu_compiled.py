"""Compiled layers on a GPU, or on the accelerator in software: the same graphs and bits as in every other window."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import stronghold
from tests.crossed import crossed
from tests.gpu import DEVICE, needs_device
from tests.small import ADAMW, Block, Residual, numbers

pytestmark = [pytest.mark.gpu, needs_device]


@pytest.fixture(autouse=True)
def _compiles_afresh():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not compiled and runs eagerly")
        yield


def build():
    """No dropout: PyTorch computes it again in a graph on CPUs, CUDA, ROCm and XPU alone."""
    torch.manual_seed(0)
    return Residual(block=lambda: Block(dropout=0))


def train(passes=1, update="deferred", frozen=(), **offload):
    """Returns the losses and the final weights of a run, and the number of graphs after each step.

    The parameters with ``frozen`` in their names are not trained.
    """
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    stronghold.offload(model, device=DEVICE, **offload)
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW, update=update)
    losses, graphs = [], []
    for number, batch in enumerate(numbers(6)):
        loss = model(batch.to(DEVICE, model.into.weight.dtype))
        loss.backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"])
        losses.append(loss.item())
    return losses, [p.detach().cpu().clone() for p in model.parameters()], graphs, stronghold.report(model)


def check_alike(settings, *, dtype, **more):
    """Compiled in a window of one it is as eager, to rounding; under ``settings`` to the bit, by the same graphs."""
    more = {"dtype": dtype, **more}
    first, eager = train(window=1, **more, compile="aot_eager"), train(window=1, **more)
    assert first[0] == pytest.approx(eager[0], rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert first[3].compiled == 4
    for one in settings:
        got = train(**one, **more, compile="aot_eager")
        assert got[0] == first[0], one
        assert all(map(torch.equal, got[1], first[1])), one
        assert got[3].compiled == 4
        assert len(set(got[2][1:])) == 1


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_windows_and_activations_share_the_graphs_and_change_no_bit(dtype, passes, tmp_path):
    """With ``passes`` a gradient is on the host, its parameter on the device, when a graph is made."""
    settings = [
        {"window": 2},
        {"window": 4, "activations": "keep"},
        {"window": 1, "activations": "keep"},
        {"window": 2, "activations": "host"},
        {"window": 1, "store": str(tmp_path)},
        *([{"window": 2, "resident": 2}, {"window": 2, "update": "in_backward"}] if passes == 1 else []),
    ]
    check_alike(settings, dtype=dtype, passes=passes)


@pytest.mark.parametrize(
    ("more", "dtype"),
    crossed([{"micro_batch": 1}, {"frozen": ("layers.1.", "bias")}], [torch.float32, torch.bfloat16], together=1),
)
def test_micro_batches_and_frozen_parameters_are_compiled(more, dtype, tmp_path):
    settings = [
        {"window": 2},
        {"window": 4, "activations": "host"},
        {"window": 2, "activations": "keep"},
        {"window": 1, "store": str(tmp_path), "update": "in_backward"},
    ]
    check_alike(settings, dtype=dtype, **more)


def test_layers_that_are_compiled_with_gradients_on_the_host_take_no_notice_of_them():
    """A shape that is new in a second backward pass before a step."""
    model = stronghold.offload(build(), device=DEVICE, window=1, compile="aot_eager")
    batches = numbers(2)
    model(batches[0].to(DEVICE)).backward()
    model(batches[1][:, :3].to(DEVICE)).backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert all(parameter.grad is not None for parameter in model.layers.parameters())
