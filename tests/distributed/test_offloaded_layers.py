"""What layers take and move in a stage: against a stage that is offloaded, its report and its arithmetic."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.distributed.layered_model import LayeredSequential
from stronghold.distributed.offloaded_layers import machine_known, offloaded_stages
from stronghold.distributed.shapes import Shapes
from stronghold.engine.budget import BUFFERS, held_on_device
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.choices import Choice
from tests.planner import machines

CPU = torch.device("cpu")
CONFIG = GPTConfig(layers=5, hidden=32, heads=2, sequence=16, vocabulary=100)


def gpt(device="cpu"):
    with torch.device(device):
        return LayeredGPT(GPT(CONFIG))


def uneven():
    wide = (nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 40))
    row = LayeredSequential(nn.Sequential(*wide), loss=F.mse_loss)
    row.layers[1].requires_grad_(False)
    return row


ROWS = pytest.mark.parametrize("build", [gpt, uneven])


def alone(row, first, end):
    """Returns a stage as it is offloaded, and the name of its row of layers."""
    return nn.Sequential(row.stage(first, end)), f"0{row.container and '.'}{row.container}"


@ROWS
@pytest.mark.parametrize(("first", "end", "window"), [(0, 2, 2), (1, 4, 2), (0, 4, 1), (2, 4, 3), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_stage_holds_what_its_report_says(build, first, end, window, dtype):
    row = build()
    planned = offloaded_stages(row, window, device=CPU, dtype=dtype).held_bytes(first, end)
    stage, layers = alone(row, first, end)
    stronghold.offload(stage, device="cpu", layers=layers, window=min(window, end - first), dtype=dtype)
    found = stronghold.report(stage)
    assert found.slots_device_bytes > 0
    assert planned == found.slots_device_bytes + found.gradients_device_bytes + found.root_device_bytes


@ROWS
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 4), (2, 4)])
def test_on_a_device_with_memory_of_its_own_it_is_what_the_engine_s_arithmetic_says(build, first, end):
    row = build()
    planned = offloaded_stages(row, 2, device=torch.device("cuda")).held_bytes(first, end)
    stage, layers = alone(row, first, end)
    memory = ModelMemory(stage, layers=[layers], is_host=False).of(Choice(window=2))
    assert planned == held_on_device(memory, 2, (), BUFFERS)


class KeptNorms(nn.Sequential):
    def _get_dtype_plan(self, dtype):
        return {"norm": torch.float32} if dtype is torch.bfloat16 else {}


def test_what_transformers_keeps_in_fp32_counts_so():
    layers = [nn.Sequential(OrderedDict(linear=nn.Linear(64, 64), norm=nn.LayerNorm(64))) for _ in range(3)]
    row, plain = (LayeredSequential(kind(*layers), loss=F.mse_loss) for kind in (KeptNorms, nn.Sequential))
    expected = [layer.slot_bytes for layer in offloaded_stages(plain, 1, device=CPU, dtype=torch.bfloat16).layers]
    found = offloaded_stages(row, 1, device=CPU, dtype=torch.bfloat16).layers
    assert [layer.slot_bytes for layer in found] == [bytes_ + 2 * 2 * 64 for bytes_ in expected]
    stage = Shapes([row.stage(0, 3)], torch.bfloat16)._stages[0]
    assert {str(p.dtype) for n, p in stage.named_parameters() if "norm" in n} == {"torch.float32"}


def test_trained_elements_are_those_that_the_host_updates():
    row = gpt("meta")
    layer, embedding = (sum(p.numel() for p in module.parameters()) for module in (row.layers[1], row.model.embedding))
    norm = sum(p.numel() for p in row.model.norm.parameters())
    elements = [one.elements for one in offloaded_stages(row, 2, device=CPU).layers]
    assert elements == [layer + embedding, layer, layer, layer, layer + embedding + norm]
    # An accelerator updates the root's by itself, but for what both ends have.
    elements = [one.elements for one in offloaded_stages(row, 2, device=torch.device("cuda")).layers]
    assert elements == [layer + embedding, layer, layer, layer, layer + embedding]
    frozen = offloaded_stages(uneven(), 2, device=CPU).layers[1]
    assert (frozen.elements, frozen.gradient_bytes) == (0, 0) and frozen.slot_bytes >= 4 * (33 * 5 + 5)


def test_processes_of_a_machine_share_its_threads_and_its_memory_s_speed():
    a_gpu, a_cpu = (
        offloaded_stages(gpt("meta"), 2, device=device, machine=machine, processes=4).machine
        for device, machine in ((torch.device("cuda"), machines.machine()), (CPU, machines.laptop()))
    )
    assert (a_gpu.host_update_ns, a_gpu.h2d_bytes_per_s, a_gpu.d2h_bytes_per_s) == (4 * 0.5, 25e9, 25e9)
    assert (a_cpu.host_update_ns, a_cpu.h2d_bytes_per_s) == (4 * 0.5, 25e9 / 4)
    in_bf16 = offloaded_stages(gpt("meta"), 2, device=CPU, dtype=torch.bfloat16, machine=machines.laptop())
    assert in_bf16.machine.host_update_ns == 0.45


def test_a_machine_is_given_or_read_or_the_one_that_is_kept(tmp_path, monkeypatch):
    machine = machines.laptop()
    machine.write(tmp_path / "machine.json")
    assert machine_known(machine, CPU) is machine
    assert machine_known(tmp_path / "machine.json", CPU).link == machine.link
    monkeypatch.setattr("stronghold.distributed.offloaded_layers.kept_machine", lambda device: (device, "kept"))
    assert machine_known(None, CPU) == (CPU, "kept")
    with pytest.raises(FileNotFoundError):
        machine_known(tmp_path / "none.json", CPU)
