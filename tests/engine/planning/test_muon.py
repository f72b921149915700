"""Plans for Muon: its bytes are the report's, and its step is the engine's on machines of given speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stronghold
from benchmarks.plan_cases import draw, run
from stronghold.engine.model_units import units_of
from stronghold.engine.planning.muon_work import muon_units
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.optim.muon_groups import COEFFICIENTS
from stronghold.optim.muon_step import newton_schulz
from stronghold.planner.machine_file import DISK
from stronghold.planner.training_plan import TrainingPlan
from stronghold.unit import unit_of
from tests.crossed import crossed
from tests.planner.machines import about, laptop, machine

CONFIG = GPTConfig(layers=5, hidden=64, heads=4, sequence=32, vocabulary=128)


@pytest.fixture(autouse=True)
def _process_of_known_size(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)


def planned(given=None, **settings):
    with torch.device("meta"):
        model = GPT(CONFIG)
    return stronghold.plan(model, machine=given or laptop(), **{"batch": 4, "sequence": 32, **settings})


def groups(model):
    """Returns the groups that a plan is for: the layers' matrices, and the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and not unit_of(p).is_root]
    own = set(map(id, matrices))
    return [{"params": matrices}, {"params": [p for p in model.parameters() if id(p) not in own], "use_muon": False}]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        pytest.param(None, {}, marks=pytest.mark.long),
        (torch.bfloat16, {"window": 2, "resident": 1}),
        pytest.param(None, {"window": 3, "resident": 0, "update": "in_backward"}, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, {"window": 1, "store": "disk"}, marks=pytest.mark.long),
        (None, {"store": "disk", "host_memory": "1GiB"}),
        (None, {"window": 2, "store": "disk", "update": "in_backward"}),
    ],
    ids=str,
)
def test_bytes_are_the_reports_to_the_byte(settings, dtype, tmp_path):
    here = laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    if settings.get("store") == "disk":
        settings = {**settings, "store": str(tmp_path)}
    plan = planned(here, dtype=dtype, optimizer="muon", **settings)
    model = stronghold.offload(GPT(CONFIG), device="cpu", dtype=dtype, **plan.settings)
    optimizer = stronghold.Muon(groups(model), **plan.optimizer)
    ids = torch.randint(0, 128, (4, 32))
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = stronghold.report(model)
    assert plan.slots_bytes == report.slots_device_bytes
    assert plan.gradient_bytes == report.gradients_device_bytes
    assert plan.root_bytes == report.root_device_bytes
    assert plan.resident_bytes == report.resident_device_bytes
    assert plan.update_bytes == report.update_device_bytes > 0
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
    assert plan.disk_bytes == report.disk_bytes
    stronghold.close(model)


@pytest.mark.parametrize(("seed", "tokens"), crossed(range(5), [40, 400, 4000], together=1))
def test_a_step_is_the_engines_by_its_clocks(seed, tokens):
    """From iterations that take many times what the layers compute to such that take little."""
    outcome = run(replace(draw(seed, layers=8), by_muon=True, tokens=tokens), paced=False)
    assert outcome.planned.step_s == pytest.approx(outcome.clock_s, rel=1e-9)
    assert outcome.planned.busy_s["iterations"] > 0 or outcome.planned.busy_s["updates"] == 0


def test_the_device_iterates_beside_the_layers():
    plan = planned(machine(), dtype=torch.bfloat16, optimizer="muon", window=2, resident=0)
    adamw = planned(machine(), dtype=torch.bfloat16, window=2, resident=0)
    assert plan.step_s.likely > adamw.step_s.likely
    assert plan.busy_s["iterations"] > 0 == adamw.busy_s["iterations"]
    assert any("AdamW all else" in text for text in plan.assumed)


@pytest.mark.parametrize("shape", [(48, 64), (64, 64), (96, 32)], ids=str)
def test_iterations_count_what_torch_counts_of_them(shape):
    layers = nn.Sequential(*(nn.Linear(*shape[::-1], bias=False) for _ in range(2)))
    (one, _) = muon_units(units_of(nn.Sequential(layers), None, None, 64, apart=True, in_pieces=False))
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape).bfloat16(), coefficients=COEFFICIENTS, steps=5, eps=1e-7)
    assert sum(op.flops * count for op, count in one.iterations.items()) == counter.get_total_flops()


def test_a_plan_is_written_and_read_and_says_whose_it_is(tmp_path):
    plan = planned(optimizer="muon")
    plan.write(tmp_path / "plan.json")
    again = TrainingPlan.read(tmp_path / "plan.json")
    assert (again.updated_by, again.optimizer, again.update_bytes) == ("Muon", plan.optimizer, plan.update_bytes)
    assert ("Muon", "update", "'deferred'") in again.rows()
    assert any(section == "assumed" for section, _, _ in again.rows())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer must be 'adamw' or 'muon'"),
        ({"states": "8bit"}, "Muon's momentum is in fp32"),
        ({"processes": 2}, "a plan of several processes is for AdamW"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        planned(**{"optimizer": "muon", **change})


def test_auto_takes_what_was_planned_for_muon(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: laptop())
    ids = torch.randint(0, 128, (4, 32))
    model = stronghold.offload(GPT(CONFIG), device="cpu", inputs={"input_ids": ids, "labels": ids})
    optimizer = stronghold.Muon(groups(model), update="auto")
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    step = stronghold.report(model).planned
    assert step is not None
    assert ("update='in_backward'" in step.chosen) == optimizer.in_backward
    assert "states=" not in step.chosen
    stronghold.close(model)
