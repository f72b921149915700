"""What a unit's parts lie in, in host memory: shared where users look at it, else the engine's own, in huge pages."""

from pathlib import Path

import pytest
import torch
from torch import nn

import stronghold
from stronghold.native import Blocks
from stronghold.unit import unit_of
from tests.device.test_memory import mapping

HUGE = 2 * 2**20
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")


class Wide(nn.Module):
    """Layers whose moments are longer than a huge page, in fp32 and in eight bits, and whose remainders are, too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1536) for _ in range(3))

    def forward(self, inputs):
        return sum(layer(inputs).square().mean() for layer in self.layers)


def flags(tensor):
    return mapping(tensor.data_ptr())["VmFlags"].split()


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_moments_and_remainders_are_the_engines_own_and_weights_and_gradients_are_shared(states):
    model = stronghold.offload(Wide(), device="cpu", window=1, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    model(torch.ones(1, 1024, dtype=torch.bfloat16)).backward()
    gradient = model.layers[1].weight.grad
    optimizer.step()
    weight = model.layers[1].weight
    unit = unit_of(weight)
    own = [unit.masters.remainders[0]]
    for moment in (optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]):
        own += [moment.codes] if isinstance(moment, Blocks) else [moment]
    for tensor in own:
        assert "dc" in flags(tensor), "a child of fork has it"
        assert "hg" in flags(tensor)
    assert unit.masters.remainders[0].data_ptr() % HUGE == 0, "it begins where a huge page may"
    for tensor in (unit.weight[0], gradient):
        assert "sh" in flags(tensor)
        assert "dc" not in flags(tensor)
