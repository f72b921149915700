"""What is timed as an update is one: of every weight, by the optimizer's own arithmetic."""

import pytest
import torch

from stronghold.probing import update_speed
from stronghold.probing.update_speed import update_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(update_speed, "ELEMENTS", 64)


def test_muon_moves_all_weights_along_their_momentum():
    weights, grads = torch.full((32,), 0.5), torch.full((32,), 1e-3)
    momentum = torch.full((32,), 1e-3).lerp(grads, 1 - 0.95)
    direction = grads.lerp(momentum, 0.95).bfloat16()
    expected = weights * (1 - 1e-5) - 1e-4 * direction.float()

    update = update_of(torch.float32, "muon", torch.device("cpu"))
    update.on_host(threads=2)
    for one in update.steps:
        assert torch.equal(one.values, direction)
        torch.testing.assert_close(one.weight, expected, rtol=0, atol=6e-8)
    assert sum(grad.numel() for grad in update.grads) == 64


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_device_the_same_is_done(dtype, states):
    ours, beside = (update_of(dtype, states, torch.device("cpu")) for _ in range(2))
    ours.on_device()
    beside.on_host(threads=1)
    for one, other in zip(ours.segments, beside.segments, strict=True):
        assert not torch.equal(one.weight, torch.full_like(one.weight, 0.5)) or dtype is torch.bfloat16
        torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=6e-8)
        if one.remainder is not None:
            assert one.remainder.any()
            assert (one.remainder.int() - other.remainder.int()).abs().max() <= 2
