"""Plans for inputs that do not come by all layers, as text alone does not by a vision tower's."""

import copy
import re

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine.planning.computation import ModelComputation
from stronghold.planner.machine_file import DISK
from tests.planner.machines import about, laptop, machine
from tests.small import Block

WIDTH, SEEN, READ = 64, 3, 4


class Towers(nn.Module):
    """Reads text, and images where there are any."""

    def __init__(self, seen=SEEN):
        super().__init__()
        self.vision = nn.ModuleList(Block(WIDTH, dropout=0) for _ in range(seen))
        self.layers = nn.ModuleList(Block(WIDTH, dropout=0) for _ in range(READ))
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x, image=None):
        if image is not None:
            for layer in self.vision:
                image = layer(image)
            x = x + image
        for layer in self.layers:
            x = layer(x)
        return self.out(x).square().mean()


def text(seed=0):
    return torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(seed))


def blocks(model):
    return [*model.vision, *model.layers]


def test_what_does_not_run_computes_nothing_and_leaves_nothing_alive():
    model, plain = Towers(), Towers(seen=0)
    found = ModelComputation(model, blocks(model), (text(),))
    expected = ModelComputation(plain, blocks(plain), (text(),))
    assert found.idle == {0, 1, 2}
    assert found.layer(1).samples == 4
    assert not (found.layer(1).forward or found.layer(1).backward)
    assert found.layer(SEEN).forward == expected.layer(0).forward
    assert found.runs(None) == [[], [], [], *expected.runs(None)]
    assert not ModelComputation(model, blocks(model), (text(), text(1))).idle


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 2, "resident": 0},
        {"window": 2, "resident": 0, "activations": "keep"},
        {"window": 1, "resident": 7, "update": "in_backward", "activations": 2},
        {"window": 2, "resident": 0, "activations": "host", "micro_batch": 2},
    ],
)
def test_time_and_activations_are_those_of_the_layers_that_run(settings):
    plans = [
        stronghold.plan(Towers(seen), machine=machine(), inputs=(text(),), **settings | {"resident": resident})
        for seen, resident in ((SEEN, settings["resident"]), (0, settings["resident"] and READ))
    ]
    assert plans[0].step_s.likely == pytest.approx(plans[1].step_s.likely, rel=1e-9)
    if not settings["resident"]:  # else blocks beside their bytes count, too
        assert plans[0].activation_bytes == plans[1].activation_bytes
    names = {name for span in plans[0].spans for name in re.findall(r"layer (\d+)", span.name)}
    assert names == {"3", "4", "5", "6"}
    assert "3 of 7 layers do not run with such inputs, and take memory but no time" in plans[0].assumed
    assert not any("do not run" in one for one in plans[1].assumed)


@pytest.mark.parametrize("settings", [{}, {"window": 2, "resident": 1}, {"store": "disk", "window": 2}])
def test_bytes_are_the_reports_and_losses_those_of_a_plain_loop(settings, tmp_path):
    here = laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    if "store" in settings:
        settings = {**settings, "store": str(tmp_path)}
    torch.manual_seed(0)
    plain = Towers()
    model = copy.deepcopy(plain)
    plan = stronghold.plan(copy.deepcopy(model), machine=here, inputs=(text(),), **settings)
    model = stronghold.offload(model, device="cpu", **plan.settings)
    losses = []
    ours, theirs = stronghold.AdamW(model.parameters(), **plan.optimizer), torch.optim.AdamW(plain.parameters())
    for seed in range(3):
        for one, optimizer in ((model, ours), (plain, theirs)):
            loss = one(text(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    report = stronghold.report(model)
    assert plan.slots_bytes == report.slots_device_bytes
    assert plan.resident_bytes == report.resident_device_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
    assert plan.disk_bytes == report.disk_bytes
    assert plan.written_bytes == report.step.disk_written_bytes
    stronghold.close(model)


def test_inputs_that_no_layer_sees_are_refused():
    model = Towers()
    model.layers = nn.ModuleList()
    with pytest.raises(
        ValueError, match=r"layers of Towers must run in its forward pass \(got none of 3\); pass inputs"
    ):
        stronghold.plan(model, machine=machine(), inputs=(text(),))
