"""The methods that take any accelerator, on a GPU or on the one in software, beside PyTorch's loop on the same."""

import gc

import pytest
import torch

from tests.gpu import DEVICE, needs_device
from tests.lab.methods.ordinary import losses_of, plain_losses, prepare, settings_of

pytestmark = [pytest.mark.gpu, needs_device]


@pytest.mark.parametrize("method", ["megatron-lm", "l2l", "stronghold"])
def test_it_trains_as_pytorch_does_and_tells_what_it_takes(method):
    settings = settings_of(device=DEVICE)
    expected, plain = plain_losses(settings, DEVICE)  # on a CPU it adds in another order, and steps grow from that
    plain.cpu()
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated(DEVICE)  # what other tests of the process have left
    prepared = prepare(method, settings)
    assert losses_of(prepared) == pytest.approx(expected, rel=1e-4)  # two of the methods update on the host
    for mine, theirs in zip(prepared.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)
    report = prepared.report()
    weights = 4 * sum(p.numel() for p in plain.parameters())
    assert torch.accelerator.max_memory_allocated(DEVICE) >= report.peak_device_bytes > 0
    if method == "megatron-lm":  # weights and two moments; gradients are given up
        assert before_bytes + 3 * weights <= report.device_bytes <= report.peak_device_bytes
    if method == "l2l":
        assert report.device_bytes - before_bytes < weights
