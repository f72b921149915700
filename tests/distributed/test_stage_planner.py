"""What is planned of stages that share an embedding, beside what their processes report and what a step there takes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.device import open_device
from stronghold.distributed import Processes, in_stages
from stronghold.distributed.process_plans import plan_fields, settings_of
from stronghold.distributed.stage_planner import StagePlanner
from stronghold.distributed.staged_inputs import staged_model
from stronghold.engine.planning.memory_limits import Limits
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.staged_search import StagedChoice, StagedPlan
from stronghold.planner.staged_step import staged_step
from stronghold.reports import Report
from tests.delayed import Apart
from tests.distributed.launched import launch
from tests.planner.machines import about, laptop, machine

MESSAGES = {"message_s": about(1e-4), "bytes_per_s": about(1e9)}
DISK = {"read": about(3e9), "write": about(2e9), "read_beside_write": about(1.6e9), "write_beside_read": about(1e9)}
CONFIG = GPTConfig(layers=5, hidden=32, heads=2, sequence=8, vocabulary=100)
SIZES, SAMPLES = [2, 3], 8
EMBEDDED = GPT(CONFIG).embedding.weight.numel()
HEAD = EMBEDDED + 2 * 32
"""The last stage's root parameters: the embedding, and a norm's weight and bias."""


def planner_of(
    given: Any, *, config: GPTConfig = CONFIG, dtype: str = "float32", disk: bool = False, processes: int = 2
) -> StagePlanner:
    ids = torch.empty((SAMPLES, 8), dtype=torch.int64, device="meta")
    with torch.device("meta"):
        row = LayeredGPT(GPT(config))
    return staged_model(
        row,
        given,
        Limits(device=None if given.is_host else 2**30, host=2**30, process=0),
        [ids, ids],
        dtype=getattr(torch, dtype),
        processes=processes,
        states=["fp32"],
        kepts=[False],
        window=None,
        resident=None,
        directories=["store"] if disk else (),
    ).planner


def reported(settings: dict[str, Any], replicas: int, micro_batches: int, dtype: str, apart: bool) -> Report:
    """Returns what a process reports of its second step, by whose end all is there that a step takes."""
    sys.modules["stronghold.engine.offload"].open_device = lambda device: Apart() if apart else open_device(device)
    torch.manual_seed(0)
    processes = Processes(torch.device("cpu"), wanted=2 * replicas, replicas=replicas)
    model = in_stages(
        LayeredGPT(GPT(CONFIG)),
        processes,
        stages=2,
        micro_batches=micro_batches,
        schedule="GPipe",
        balance=SIZES,
        dtype=getattr(torch, dtype),
        **settings,
    )
    optimizer = stronghold.AdamW(model.parameters())
    ids = torch.randint(100, (SAMPLES, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.forward_backward(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    return stronghold.report(model)


def all_reported(asked: str) -> list[Report]:
    """Returns the same of each of several settings, one after the other in the same processes."""
    return [reported(*one) for one in json.loads(asked)]


CASES = [
    (2, "ram", 2, "bfloat16", True),
    (None, "ram", 2, "bfloat16", True),
    (2, "disk", 1, "float32", True),
    (2, "ram", 2, "bfloat16", False),
]
"""Window, store, micro-batches, dtype, and whether the device has memory of its own."""


@pytest.mark.parametrize(
    ("replicas", "cases"), [(1, CASES), (2, CASES[1:3]), pytest.param(2, CASES[::3], marks=pytest.mark.long)]
)
def test_bytes_are_those_of_the_reports(tmp_path: Path, replicas: int, cases: list[Any]) -> None:
    """The embedding's copies stay on the host, where both stages update them, and the norm on an accelerator."""
    planned, asked = [], []
    for number, (window, store, micro_batches, dtype, apart) in enumerate(cases):
        given = (machine if apart else laptop)(processes=MESSAGES, disks={"store": DISK})
        planner = planner_of(given, dtype=dtype, disk=store == "disk", processes=2 * replicas)
        choice = StagedChoice(replicas, 2, 1, micro_batches, False, "fp32", window, store)
        step = staged_step(planner.work_of(choice), SIZES)
        settings = settings_of(planner, StagedPlan(choice=choice, step=step), is_host=not apart)
        if store == "disk":
            settings["store"] = [str(tmp_path / f"store {number}")]
        if apart and replicas == 2:
            settings["device_memory"] *= 2
        planned.append(planner.taken(choice, step))
        asked.append((settings, replicas, micro_batches, dtype, apart))
    found = launch("tests.distributed.test_stage_planner", "all_reported", 2 * replicas, tmp_path, json.dumps(asked))
    for rank, reports in enumerate(found):
        stage = rank % 2
        for case, plan, report in zip(cases, planned, reports, strict=True):
            window, _, micro_batches, dtype, apart = case
            one, said = plan[stage], plan[stage].held
            sums = 0
            if dtype == "bfloat16" and apart:  # of which the other two bytes are where the gradients are
                resident = report.trainable_parameters - (EMBEDDED if stage == 0 else HEAD)
                sums = 2 * ((EMBEDDED if stage == 0 else HEAD) + (resident if window is None else 0))
            assert (report.resident, report.resident_root) == (
                0 if window else SIZES[stage],
                2 if apart and stage else 0,
            ), case
            assert said.slots == report.slots_device_bytes, case
            if replicas == 1:  # shares are of equal length
                assert said.gradients == report.gradients_device_bytes, case
            assert said.root == report.root_device_bytes, case
            assert said.root_gradients == report.root_gradients_device_bytes, case
            assert said.resident + sums == report.resident_device_bytes, case
            assert said.host + one.sums_bytes == report.host_bytes, case
            assert said.disk == report.disk_bytes, case


@pytest.mark.parametrize("sizes", [[1, 4], SIZES, [4, 1]])
@pytest.mark.parametrize("given", [machine, laptop])
def test_what_a_plan_tells_of_each_place_is_the_most_that_a_process_takes_there(given: Any, sizes: list[int]) -> None:
    planner = planner_of(given(processes=MESSAGES), dtype="bfloat16")
    choice = StagedChoice(1, 2, 1, 2, False, "fp32", 2)
    step = staged_step(planner.work_of(choice), sizes)
    told = plan_fields(planner, StagedPlan(choice=choice, step=step), 2)
    parts = ("slots", "gradient", "root", "resident", "root_gradient", "activation")
    device, host = (sum(told[f"{part}_bytes"] for part in each) for each in (parts, ("pinned", "pageable")))
    most = {"memory": device + host} if given is laptop else {"device": device, "host": host}
    assert planner.bytes_of(choice, step) == most


def test_an_accelerator_s_host_updates_what_stages_share_before_the_first_pass() -> None:
    choice = StagedChoice(1, 2, 1, 2, False, "fp32", 2)
    elements, all_reduced_s = EMBEDDED, 2 * (1e-4 + 0.5 * 4 * EMBEDDED / 1e9)
    assert planner_of(laptop(processes=MESSAGES)).work_of(choice).shared_s == pytest.approx(all_reduced_s)
    of = planner_of(machine(processes=MESSAGES))
    there_and_back_s = 2 * 8e-6 + (2 * 4 * elements + 8) / 25e9
    updated_s = 2 * 0.5e-9 * elements  # by half of the threads
    assert of.work_of(choice).shared_s == pytest.approx(all_reduced_s + there_and_back_s + updated_s)
    # Of two replicas each updates half, with a quarter of the threads; gradients become the mean of both before.
    of = planner_of(machine(processes=MESSAGES), processes=4)
    mean_s = 2 * (1e-4 + 0.5 * (4 * elements + 8) / 1e9)
    replicated_s = of.work_of(choice._replace(replicas=2)).shared_s
    assert replicated_s == pytest.approx(all_reduced_s + mean_s + there_and_back_s + updated_s)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 4), ("bfloat16", 4 + 2)])
def test_sums_of_what_stages_share_take_more_than_the_activations_of_a_few_tokens(dtype: str, each: int) -> None:
    config = replace(CONFIG, vocabulary=50_000)
    planner = planner_of(machine(processes=MESSAGES), config=config, dtype=dtype)
    choice = StagedChoice(1, 2, 1, 2, False, "fp32", 2)
    with torch.device("meta"):
        elements = GPT(config).embedding.weight.numel()
    first, last = planner.taken(choice, staged_step(planner.work_of(choice), SIZES))
    low = 2 * elements if dtype == "bfloat16" else 0  # of the sum of micro-batches, which stays there meanwhile
    assert first.activation_bytes == each * elements + low
    assert last.activation_bytes > 0
