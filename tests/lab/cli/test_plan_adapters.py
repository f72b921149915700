"""`stronghold plan` of adapters: the bytes are those of the model that `stronghold finetune` makes of the arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.lab import cli
from stronghold.lab.finetuning.model import build_base, place
from stronghold.lab.finetuning.settings import AdapterSettings
from stronghold.planner.training_plan import TrainingPlan
from stronghold.settings import OffloadSettings
from tests.adapters import trained
from tests.lab.cli.test_plan import refused
from tests.lab.finetuning import runs, small
from tests.planner.machines import laptop, machine

STEP = ["--batch", "2", "--seq", "16"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and the files of two machines."""
    monkeypatch.chdir(tmp_path)
    laptop().write("laptop.json")
    machine().write("gpu.json")
    small.folder(tmp_path / "model")
    return tmp_path


def planned(*arguments: str, model: str = "model", given: str = "laptop.json") -> TrainingPlan:
    assert cli.main(["plan", model, *STEP, "--machine", given, "-o", "plan.json", *arguments]) == 0
    return TrainingPlan.read("plan.json")


def placed(folder: Path, plan: TrainingPlan, adapters: AdapterSettings, **settings: Any) -> Any:
    """Returns the report of the model that a run would have, placed as planned, behind two steps."""
    given = {name: value for name, value in plan.settings.items() if name != "accumulate"}
    wanted = runs.settings(folder, adapters=adapters, offload=OffloadSettings(**given), sequence=16, **settings)
    base = build_base(wanted.model, adapters=adapters, dtype=wanted.dtype, sequence=wanted.sequence)
    model = place(base, wanted, inputs=None)
    optimizer = stronghold.AdamW(trained(model), **plan.optimizer)
    ids = torch.randint(0, 40, (2, 16))
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = stronghold.report(model)
    stronghold.close(model)
    return found


@pytest.mark.parametrize(
    ("arguments", "adapters"),
    [
        (["--lora", "4"], AdapterSettings(rank=4)),
        (["--lora", "--targets", "q_proj,down_proj"], AdapterSettings(rank=16, targets=("q_proj", "down_proj"))),
        (["--lora", "4", "--quantize", "nf4", "--dtype", "bf16"], AdapterSettings(rank=4, quantize="nf4")),
        (["--lora", "4", "--quantize", "int8", "--dtype", "bf16"], AdapterSettings(rank=4, quantize="int8")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bytes_are_those_of_a_run(here: Path, arguments: list[str], adapters: AdapterSettings) -> None:
    plan = planned(*arguments, "--window", "1", "--resident", "1")
    report = placed(here, plan, adapters, dtype="bf16" if "bf16" in arguments else "fp32")
    assert (plan.parameters, plan.trained_parameters) == (report.parameters, report.trainable_parameters)
    assert plan.slots_bytes == report.slots_device_bytes
    assert plan.gradient_bytes == report.gradients_device_bytes
    assert plan.root_bytes == report.root_device_bytes
    assert plan.resident_bytes == report.resident_device_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes


def test_a_config_alone_is_enough_and_the_table_names_what_is_trained(here: Path, capsys: Any) -> None:
    (alone := here / "alone").mkdir()
    (here / "model" / "config.json").rename(alone / "config.json")
    arguments = ("--lora", "8", "--quantize", "nf4_nested", "--dtype", "bf16")
    plan = planned(*arguments, model="alone/config.json", given="gpu.json")
    assert plan.settings == planned(*arguments, model="alone", given="gpu.json").settings
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "LlamaForCausalLM of alone/config.json in nf4_nested, LoRA of rank 8" in printed
    assert "of them trained" in printed and "stronghold finetune, which plans for itself" in printed


@pytest.mark.parametrize("arguments", [[], ["--lora"]], ids=["all weights", "adapters"])
def test_a_folder_of_which_only_the_json_files_have_been_downloaded_can_be_planned(
    here: Path, arguments: list[str]
) -> None:
    whole = planned(*arguments)
    for file in (here / "model").glob("*.safetensors"):
        file.unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    part = planned(*arguments)
    assert (part.model, part.settings, part.slots_bytes) == (whole.model, whole.settings, whole.slots_bytes)


def test_adapters_of_a_folder_are_planned_as_new_ones_like_them(here: Path) -> None:
    run = runs.settings(here, adapters=runs.LORA, steps=1, dtype="fp32")
    runs.run(run)
    there, new = planned("--adapter", run.save), planned("--lora", "4", "--lora-dropout", "0.1")
    assert (there.trained_parameters, there.host_bytes - there.process_bytes) == (
        new.trained_parameters,
        new.host_bytes - new.process_bytes,
    )
    assert there.model.endswith(f"LoRA of {run.save}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--quantize", "nf4"], "are of adapters (got none); pass --lora too"),
        (["-l", "3", "--lora"], "pass MODEL, its folder or its config.json"),
        (["model", "--lora", "--targets", "nothing"], "no layer is called nothing"),
        (["model", "--lora", "--adapter", "model"], "leave out one or the other"),
        (["model", "--adapter", "model"], "adapters are a folder with adapter_config.json"),
        (["model", "--lora", "--seq", "65"], "a sequence must not be longer than the model takes"),
        (["gpt", "--lora", "--profile", "somewhere", "--device-memory", "1GiB"], "operators alone (got --lora)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_in_one_line(arguments: list[str], message: str, capsys: Any) -> None:
    others = [] if "--profile" in arguments else ["--machine", "gpu.json", *STEP]
    assert message in refused(capsys, "plan", *others, *arguments)
