"""`stronghold plan`, and a run by what it wrote."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stronghold.lab import cli
from stronghold.planner.training_plan import TrainingPlan
from stronghold.probing.this_machine import processor_name
from tests.planner.machines import laptop, machine

SHAPE = ["-l", "3", "--hidden", "32", "--heads", "2", "--vocabulary", "256"]
STEP = ["--seq", "32", "--batch", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the files of two machines and a text."""
    monkeypatch.chdir(tmp_path)
    laptop(device_name=processor_name()).write("laptop.json")
    machine().write("gpu.json")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def refused(capsys, *arguments):
    """Returns the one line with which ``arguments`` are refused."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    return error


def test_it_prints_the_table_and_writes_the_plan_and_its_picture(capsys):
    arguments = ["plan", *SHAPE, *STEP, "--machine", "gpu.json", "--tokens", "1e6", "-o", "plan.json"]
    assert cli.main([*arguments, "--picture", "plan.html", "--window", "2"]) == 0
    printed = capsys.readouterr().out
    plan = TrainingPlan.read("plan.json")
    assert (plan.settings["window"], plan.layers, plan.samples, plan.tokens) == (2, 3, 2, 64)
    for words in ("reference GPT, 3 layers of width 32", "│ window", "1 M tokens", "longest resource"):
        assert words in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if "│" in line)
    told = next(line for line in printed.splitlines() if line.startswith("plan.json: "))
    # It named neither the plan nor the model, for which the command that it told was refused.
    assert told.endswith("stronghold train --plan plan.json --layers 3 --hidden 32 --heads 2 --vocabulary 256")
    command = told.split("stronghold ")[1].split()
    assert cli.main([*command, "--data", "text.txt", "--device", "cpu", "--out", "run"]) == 2
    assert "got plan.json with --device cuda, and --device cpu" in capsys.readouterr().err
    assert "One planned step" in Path("plan.html").read_text()


def test_names_with_brackets_are_printed_as_they_are(here, capsys):
    """They were read as markup: eaten, or an error once the plan was written."""
    for name in ("a[", "[red]b", "c :x: [v2]"):
        (here / name).mkdir()
        file = f"{name}/a].json"
        assert cli.main(["plan", *SHAPE, *STEP, "--machine", "laptop.json", "-o", file]) == 0
        assert f"\n{file}: the plan; to train by it: stronghold train --plan '{file}'" in capsys.readouterr().out
        data = ["--data", "text.txt", "--seq", "8", "--batch", "2", "--steps", "1", "--device", "cpu"]
        assert cli.main(["train", *SHAPE, *data, "--out", f"{name}/run", "--save", f"{name}/[/kept]"]) == 0
        assert f"\nmodel saved in {name}/[/kept]\n" in capsys.readouterr().out


def test_only_what_is_not_asked_for_is_told_to_be_allowed(capsys):
    for arguments, told in (
        ([], "allow states='8bit', give a directory"),
        (["--states", "8bit", "--update", "in_backward"], "raise the budget, give a directory"),
        (["--optimizer", "muon"], "raise the budget, give a directory"),
    ):
        found = refused(capsys, "plan", *SHAPE, *STEP, "--machine", "laptop.json", "--host-memory", "1MiB", *arguments)
        assert told in found
    for states, told in (("fp32", "of each process, allow states='8bit', keep"), ("8bit", "of each process, keep")):
        budget = ["--machine", "gpu.json", "--device-memory", "1KiB", "--processes", "2", "--states", states]
        assert told in refused(capsys, "plan", *SHAPE, *STEP, *budget)


def test_sizes_in_a_plans_file_may_have_units(capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "gpu.json", "-o", "plan.json"]) == 0
    plan = TrainingPlan.read("plan.json")
    replace(plan, settings={**plan.settings, "device_memory": "3GiB"}).write("edited.json")
    assert ("", "device_memory", "3.00 GiB") in TrainingPlan.read("edited.json").rows()


def test_it_prints_the_table_where_there_are_no_columns(capsys, monkeypatch):
    """Under COLUMNS=0 it printed nothing at all, and ended well."""
    monkeypatch.setenv("COLUMNS", "0")
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "gpu.json"]) == 0
    assert re.search(r"window +│ \d", capsys.readouterr().out)


def test_it_plans_for_a_card_by_its_maker_s_numbers(capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--card", "rtx 4090", "--host-memory", "8GiB", "-o", "plan.json"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "RTX 4090, by its maker's numbers" in printed and "assumed nothing was measured" in printed
    assert "to train by it: stronghold probe there" in printed  # no machine is called so
    plan = TrainingPlan.read("plan.json")
    assert plan.step_s.low < plan.step_s.likely < plan.step_s.high


def test_it_plans_for_muon(capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "gpu.json", "--optimizer", "muon", "-o", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert TrainingPlan.read("plan.json").updated_by == "Muon"
    assert "│ Muon" in printed and "│ assumed" in printed and "train --plan" not in printed


def test_it_plans_for_parts_of_experts(capsys):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"num_experts": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "vocab_size": 16, "head_dim": 8}
    Path("config.json").write_text(json.dumps(config))
    arguments = ["plan", "config.json", "--seq", "4", "--batch", "1", "--machine", "gpu.json", "--window", "2"]
    arguments += ["--resident", "0", "--activations", "recompute", "--update", "deferred"]
    assert cli.main([*arguments, "-o", "whole.json"]) == 0
    whole = TrainingPlan.read("whole.json")
    assert whole.experts_per_part is None
    capsys.readouterr()
    assert cli.main([*arguments, "--device-memory", f"{whole.device_bytes // 2}B", "-o", "parts.json"]) == 0
    printed = capsys.readouterr().out
    plan = TrainingPlan.read("parts.json")
    assert plan.experts_per_part in (1, 2, 4, 8) and plan.layers > 2
    assert re.search(rf"experts_per_part +│ {plan.experts_per_part} ", printed)
    assert "train --plan" not in printed


def test_a_run_follows_its_plan_and_says_how_far_that_was_off(capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "laptop.json", "-o", "plan.json", "--states", "8bit"]) == 0
    plan = TrainingPlan.read("plan.json")
    capsys.readouterr()
    run = ["train", "--plan", "plan.json", *SHAPE, "--data", "text.txt", "--steps", "4", "--out", "out"]
    assert cli.main(run) == 0
    printed = capsys.readouterr().out
    assert re.search(r"step +│ planned +│ ", printed)
    assert re.search(r"measured +│ .*[+-]\d+%", printed)
    assert re.search(r"computing +│ .* planned, .* measured", printed)
    assert "off by" in printed  # no step takes as little as a made-up machine says
    logged = json.loads(Path("out/log.jsonl").read_text().splitlines()[0])
    settings = logged.get("settings", logged)
    assert (settings["states"], settings["batch"], settings["sequence"]) == ("8bit", 2, 32)
    assert settings["resident"] == plan.settings["resident"]


def test_a_run_goes_on_in_the_directories_of_its_plan(capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "laptop.json", "-o", "ram.json"]) == 0
    plan = TrainingPlan.read("ram.json")
    replace(plan, settings={**plan.settings, "store": ["run-12:30:05", "other"]}).write("plan.json")
    run = ["train", "--plan", "plan.json", *SHAPE, "--data", "text.txt", "--out", "out"]
    capsys.readouterr()
    assert cli.main([*run, "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"kept +run-12:30:05, other: .* --resume --out out --plan, as before", printed)
    assert not Path("run-12").exists() and list(Path("run-12:30:05").iterdir()) and list(Path("other").iterdir())
    gc.collect()  # the store is given up with its model
    assert cli.main([*run, "--steps", "3", "--resume"]) == 0
    assert re.search(r"from \S*run-12:30:05, after step 2", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *SHAPE, "--machine", "nowhere.json"], "nowhere.json"),
        (["plan", *SHAPE, "--machine", "text.txt"], "file of the machine file text.txt must be JSON"),
        (["plan", "nowhere/", "--machine", "gpu.json"], "nowhere"),
        (["plan", "text.txt", "-l", "3", "--machine", "gpu.json"], "a model from files has its own shape"),
        (["plan", *SHAPE, "-l", "1", "--machine", "gpu.json"], "pass a model of two layers or more, or, in Python, "),
        (["plan", *SHAPE, "--machine", "gpu.json", "--batch", str(10**10)], "the ids of a batch, 8 bytes for each"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--device-memory", "1KiB"], "nothing fits: device memory must hold"),
        (["plan", *SHAPE, "--machine", "laptop.json", "--device-memory", "1GiB"], "a device has memory of its own"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--disk", "elsewhere"], "speed of each directory"),
        (["plan", *SHAPE, "--machine", "gpu.json", "-o", "text.txt/plan.json"], "output must be a file that can be"),
        (["train", *SHAPE, "--plan", "text.txt"], "'text.txt' is no plan"),
        (["train", *SHAPE, "--plan", "plan.json", "--batch", "3"], "with --batch 2, and --batch 3"),
        (["train", *SHAPE, "--plan", "plan.json", "--method", "l2l"], "a plan is of method stronghold"),
        (["train", "-l", "4", *SHAPE[2:], "--plan", "plan.json", "--data", "text.txt"], "a plan is of one model"),
        (["train", *SHAPE, "--plan", "elsewhere.json", "--data", "text.txt"], "a plan is of one machine"),
        (["train", *SHAPE, "--plan", "muon.json", "--data", "text.txt"], "stronghold train updates by AdamW"),
        (["train", *SHAPE, "--plan", "parts.json", "--data", "text.txt"], "with parts of 2 experts); train by it in"),
        (["train", *SHAPE, "--plan", "sums.json", "--data", "text.txt"], "a plan of steps that accumulate 2); train"),
        (["plan", *SHAPE, "--card", "GTX 1080", "--host-memory", "64GiB"], "a card must be one of RTX 3090, "),
        (["plan", *SHAPE, "--card", "4090"], "pass --host-memory too, such as --host-memory 64GiB"),
        (["plan", *SHAPE, "--card", "4090", "--machine", "gpu.json"], "got --card 4090 with --machine); leave out"),
        (["plan", *SHAPE, "--card", "4090", "--host-memory", "1MiB"], "nothing fits: host memory must hold"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--accumulate", "0"], "accumulate must be 1 or more"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--accumulate", str(2**62)], "tokens must be a number that 64 bits"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--experts-per-part", "0"], "none in GPT"),
        (
            ["plan", *SHAPE, "--machine", "gpu.json", "--tokens", "1e18"],
            "from 1 to below 1e18, such as 1e9 (got",
        ),
        (["plan", *SHAPE, "--machine", "gpu.json", "--processes", str(2**60)], "processes must be at most 12 "),
        (["plan", *SHAPE, "--machine", "gpu.json", "--accumulate", "2", "--update", "in_backward"], "(got accumulate="),
        (["plan", *SHAPE, "--machine", "gpu.json", "--experts-per-part", "2"], "none in GPT"),
        (["plan", *SHAPE, "--machine", "gpu.json", "--experts-per-part", "most"], "must be a whole number or auto"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_in_one_line(arguments, message, capsys):
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "laptop.json", "-o", "plan.json"]) == 0
    replace(TrainingPlan.read("plan.json"), updated_by="Muon", optimizer={"update": "deferred"}).write("muon.json")
    plan = TrainingPlan.read("plan.json")
    replace(plan, settings={**plan.settings, "experts_per_part": 2}).write("parts.json")
    replace(plan, settings={**plan.settings, "accumulate": 2}).write("sums.json")
    replace(TrainingPlan.read("plan.json"), machine="a processor that nobody has").write("elsewhere.json")
    capsys.readouterr()
    assert message in refused(capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_plan_for_a_gpu_is_refused_where_there_is_none(capsys):
    """It ended in 'AssertionError: Torch not compiled with CUDA enabled'."""
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "gpu.json", "-o", "plan.json"]) == 0
    capsys.readouterr()
    error = refused(capsys, "train", *SHAPE, "--plan", "plan.json", "--data", "text.txt", "--out", "out")
    assert error.startswith("stronghold: error: device 'cuda' needs a CUDA device")


def test_a_window_beside_resident_layers_is_as_offload_takes_it(capsys):
    """It said 'nothing fits: ; raise the budget'."""
    for window, resident, taken in ((3, 3, 1), (3, 1, 2), (1, 2, 1)):
        asked = ["--window", str(window), "--resident", str(resident), "-o", "plan.json"]
        assert cli.main(["plan", *SHAPE, *STEP, "--machine", "gpu.json", *asked]) == 0
        settings = TrainingPlan.read("plan.json").settings
        assert (settings["window"], settings["resident"]) == (taken, resident)


@pytest.mark.parametrize("device", ["", "xxxxx"])
def test_a_machine_s_file_of_a_device_that_torch_does_not_know_is_refused(device, capsys):
    replace(laptop(), device=device).write("odd.json")
    assert cli.main(["plan", *SHAPE, *STEP, "--machine", "odd.json"]) == 2
    assert f"device must be a name that torch knows (got {device!r})" in capsys.readouterr().err
