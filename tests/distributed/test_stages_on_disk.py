"""Stages with layers on disk: what is planned of them beside what the processes report, and what is planned at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.staged_inputs import staged_model
from stronghold.engine.planning.memory_limits import Limits
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.staged_search import StagedChoice
from stronghold.planner.staged_step import staged_step
from stronghold.reports import Report
from tests.distributed.launched import launch
from tests.planner.machines import about, laptop, machine

MESSAGES = {"message_s": about(1e-4), "bytes_per_s": about(1e9)}
DISK = {"read": about(3e9), "write": about(2e9), "read_beside_write": about(1.6e9), "write_beside_read": about(1e9)}
SIZES = [2, 4]
WIDE, SAMPLES = 64, 8


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)) for _ in range(sum(SIZES))]
    for parameter in layers[2].parameters():
        parameter.requires_grad_(False)
    return nn.Sequential(*layers)


def reported(states: str, store: str) -> Report:
    """Returns what a process of two reports of its third step, in which the updates of the second are written."""
    inputs = torch.randn(SAMPLES, WIDE)
    model = stronghold.pipeline(
        tower(),
        loss=F.mse_loss,
        stages=2,
        micro_batches=2,
        balance=SIZES,
        inputs=inputs,
        device="cpu",
        window=2,
        resident=0,
        store=[store],
    )
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    for _ in range(3):
        model.forward_backward(inputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
    return stronghold.report(model)


@pytest.mark.parametrize("states", [pytest.param("fp32", marks=pytest.mark.long), "8bit"])
def test_bytes_are_those_of_the_reports(tmp_path: Path, states: str) -> None:
    given = laptop(disks={"store": DISK}, processes=MESSAGES)
    planner = staged_model(
        LayeredSequential(tower(), lambda output, _: output.square().mean()),
        given,
        Limits(device=None, host=2**30, process=0),
        [torch.empty(SAMPLES, WIDE)],
        dtype=None,
        processes=2,
        states=[states],
        kepts=[False],
        window=2,
        resident=0,
        directories=["store"],
    ).planner
    choice = StagedChoice(1, 2, 1, 2, False, states, 2, "disk")
    step = staged_step(planner.work_of(choice), SIZES)
    found = launch("tests.distributed.test_stages_on_disk", "reported", 2, tmp_path, states, str(tmp_path / "store"))
    most = 0
    for one, report in zip(planner.taken(choice, step), found, strict=True):
        said = one.held
        assert (said.slots, said.gradients) == (report.slots_device_bytes, report.gradients_device_bytes)
        assert said.host == report.host_bytes
        assert said.disk == report.disk_bytes > 0
        assert one.written_bytes == report.step.disk_written_bytes > 0
        most = max(most, said.host + said.device + one.activation_bytes)
    assert planner.bytes_of(choice, step) == {"memory": most}


@pytest.mark.parametrize("of", [pytest.param(machine, marks=pytest.mark.long), laptop])
def test_layers_are_on_disk_where_memory_does_not_hold_them(of, tmp_path, monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)
    with torch.device("meta"):
        row = LayeredGPT(GPT(GPTConfig(layers=24, hidden=1024, heads=16, sequence=128, vocabulary=512)))
    given = of(processes=MESSAGES, disks={str(tmp_path): DISK})
    limit = 1500 * 2**20
    asked = {"batch": 3, "sequence": 128, "processes": 2, "machine": given, "host_memory": limit}
    if of is machine:
        asked["device_memory"] = "400MiB"
    with pytest.raises(BudgetError, match="nothing fits 2 processes"):
        stronghold.plan(row, **asked)
    plan = stronghold.plan(row, store=tmp_path, **asked)
    assert plan.settings["store"] == [str(tmp_path)]
    assert "host_memory" not in plan.settings  # with which the engine would fill it, and adding up gradients takes more
    assert plan.parallel["stages"] == 2
    assert plan.host_bytes <= limit
    assert plan.longest == "disk" and plan.busy_s["disk"] > plan.busy_s["compute"]
    assert plan.waits_s["disk"] > 0
    # all of a layer that is on disk is written at each step: weights, and moments of twice their size
    assert 0 < plan.written_bytes <= plan.disk_bytes <= 12 * plan.parameters
    assert re.search(r"layers and states +\S+ \S+, of the fullest process", str(plan))
    assert stronghold.plan(row, store=tmp_path, **{**asked, "host_memory": "8GiB"}).disk_bytes == 0
