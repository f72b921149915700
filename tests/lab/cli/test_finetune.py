"""`stronghold finetune`: what its options and a run's file mean, what they cannot take, and a run from end to end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM

import stronghold
from stronghold.lab import cli
from stronghold.lab.cli.finetune import _finetune_settings
from stronghold.lab.cli.finetune_arguments import DEFAULTS
from stronghold.lab.command import INTERRUPTED, WRONG_USAGE
from stronghold.lab.finetuning.settings import FinetuneSettings
from tests.lab.finetuning import small
from tests.planner.machines import laptop

ROOT = Path(__file__).parents[3]


def settings(*words: str) -> FinetuneSettings:
    return _finetune_settings(cli._parser().parse_args(["finetune", *words]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.folder(tmp_path / "model")
    small.write_lines(tmp_path / "chats.jsonl", small.chats(12))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_defaults_are_what_the_help_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = settings("model", "chats.jsonl", "--device", "cpu")
    assert (found.dtype, found.batch, found.accumulate, found.sequence, found.epochs) == ("fp32", 8, 1, 1024, 1.0)
    assert (found.course.lr, found.course.scheduler, found.course.max_grad_norm) == (2e-5, "linear", 1.0)
    assert (found.data.loss, found.data.long_rows, found.data.packing) == ("completions", "refuse", False)
    assert found.adapters is None
    assert found.plans
    assert (found.offload.window, found.offload.resident, found.offload.activations) == ("auto", "auto", "auto")
    assert found.out.startswith("runs/")
    assert found.save == os.path.join(found.out, "model")
    assert settings("model", "chats.jsonl", "--device", "cuda").dtype == "bf16"
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for default in ("(default: 1024)", "(default: 2e-5; of adapters 2e-4)", "(default: OUT/model)"):
        assert default in told


def test_options_are_settings(place: Path) -> None:
    words = (
        "model chats.jsonl --lora 8 --targets q_proj,v_proj --lora-dropout 0.1 --epochs 2.5 --batch 2 "
        "--scheduler cosine_with_min_lr --scheduler-options min_lr=1e-6,num_cycles=1 --clip 0 --packing "
        "--quantize nf4_nested --window 2 --out o --store disk --checkpoint-every 7 --held-out 3 --eval-every 9 "
        "--dtype bf16 --compile"
    )
    found = settings(*words.split())
    assert found.adapters is not None
    assert (found.adapters.rank, found.adapters.alpha, found.adapters.targets) == (8, 16.0, ("q_proj", "v_proj"))
    assert found.adapters.quantize == "nf4_nested"
    assert found.course.lr == 2e-4
    assert found.course.scheduler_options == {"min_lr": 1e-6, "num_cycles": 1}
    assert found.course.max_grad_norm is None
    assert (found.offload.window, found.offload.activations, found.offload.store) == (2, "recompute", "o/store")
    assert found.offload.compile == {"dynamic": True}
    assert settings("model", "chats.jsonl", "--no-compile").offload.compile is False
    for words in ("--activations 0", "--activations 0 --window 2"):
        assert settings("model", "chats.jsonl", *words.split()).offload.activations == 0
    assert not found.plans
    assert (found.epochs, found.data.packing, found.data.held_out, found.eval_every) == (2.5, True, 3, 9)
    assert settings("model", "chats.jsonl", "--lora").adapters.rank == 16  # type: ignore[union-attr]
    assert settings("model", "chats.jsonl", "--adapter", "model").adapters.path == "model"  # type: ignore[union-attr]


def test_an_update_that_is_left_open_is_that_of_the_default(place: Path) -> None:
    for words, resolved in [("", "deferred"), ("--clip 0", "auto"), ("--clip 0 --window 2", "deferred")]:
        for more in ("", "--update auto"):
            assert settings("model", "chats.jsonl", *words.split(), *more.split()).update == resolved, (words, more)


FILE = """\
model: model
data: chats.jsonl
lora: 8
targets: [q_proj, v_proj]
lora-dropout: 0.1
epochs: 2.5
lr: 2e-4
packing: true
scheduler: cosine_with_min_lr
scheduler_options: {min_lr: 1e-6, num_cycles: 1}
checkpoint-every: 7
out: o
window: auto
compile: true
seed: 0
"""


def test_a_runs_file_means_what_the_options_of_its_names_mean(place: Path) -> None:
    (place / "run.yaml").write_text(FILE)
    words = (
        "model chats.jsonl --lora 8 --targets q_proj,v_proj --lora-dropout 0.1 --epochs 2.5 --lr 2e-4 --packing "
        "--scheduler cosine_with_min_lr --scheduler-options min_lr=1e-6,num_cycles=1 --checkpoint-every 7 --out o "
        "--compile"
    )
    assert settings("run.yaml") == settings(*words.split())
    given = settings("run.yaml", "--lora", "4", "--resume", "--out", "p")
    assert given == settings(*words.split(), "--lora", "4", "--resume", "--out", "p")
    (place / "run.yml").write_text(FILE.replace("lora: 8", "lora: true").replace("packing: true", "packing: false"))
    found = settings("run.yml")
    assert found.adapters is not None
    assert (found.adapters.rank, found.data.packing) == (16, False)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["finetune", *words]) == WRONG_USAGE
    told = capsys.readouterr().err
    assert told.startswith("stronghold: error: ")
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE + "learning-rate: 3\n", "run.yaml:16: 'learning-rate' is none); see stronghold finetune --help"),
        (FILE.replace("epochs", "epoch"), "run.yaml:6: 'epoch' is none); did you mean epochs?"),
        (FILE + "lr: 1\n", "run.yaml:16: 'lr', again)"),
        (FILE.replace("2.5", "many"), "run.yaml:6: got 'many'"),
        (FILE.replace("packing: true", "packing: 3"), "packing is true or false (at run.yaml:8: got '3')"),
        (FILE.replace("cosine_with_min_lr", "cosinus"), "run.yaml:9: got 'cosinus'"),
        (FILE.replace("[q_proj", "[q_proj,"), "run.yaml:4: "),
        *(
            (f"model: model\n{key}:\n", f"{key} must have a value (at run.yaml:2: got none); give it one")
            for key in ("clip", "epochs", "warmup", "weight-decay", "packing", "lora", "store", "wandb")
        ),
        (FILE.replace("out: o", "out: yes"), "out is not true or false (at run.yaml:12: got True, which YAML"),
        (FILE + "log: false\n", "log is not true or false (at run.yaml:16: got False, which YAML"),
        (FILE.replace("2e-4", "!!python/name:os.system 3"), "must be YAML (at run.yaml:7: could not determine"),
        (FILE.replace("2e-4", "2026-13-01"), "must be YAML (at run.yaml:7: month must be in 1..12"),
        ("- model\n", "must have the options' names as keys (got 'run.yaml'"),
        ("", "must have the options' names as keys (got 'run.yaml'"),
        ("lr: 1\n", "must name a model"),
        ("model: model\n", "a run needs data"),
        (FILE + "help: true\n", "'help' is none"),
    ],
)
def test_a_runs_file_that_is_wrong_is_told_with_its_line(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (place / "run.yaml").write_text(text)
    assert message in refused(capsys, "run.yaml")
    assert not (place / "o").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model", "a run needs data"),
        ("nowhere.yaml", "a run's file must be readable (got 'nowhere.yaml': No such file"),
        ("run.yaml chats.jsonl", "a run's file names its data"),
        ("nowhere chats.jsonl --seq 32", "folder with a config.json (got 'nowhere')"),
        ("model nowhere.jsonl --seq 32", "which gives none"),
        ("model chats.jsonl", "--seq 1024, at model/config.json: 64)"),
        ("model chats.jsonl --seq 5", "at chats.jsonl:1: 9 tokens, the sequence has 5; 12 rows are longer"),
        ("model chats.jsonl --resume", "--resume goes on with the run in a folder"),
        ("model chats.jsonl --epochs 2 --steps 3", "a run has epochs or steps (got --epochs 2 --steps 3)"),
        ("model chats.jsonl --adapter model --lora", "(got --adapter with --lora)"),
        ("model chats.jsonl --adapter model --lora-dropout 0.1", "(got --adapter with --lora-dropout)"),
        ("model chats.jsonl --lora-alpha 3", "are of adapters (got none)"),
        ("model chats.jsonl --lora-dropout 0.1", "are of adapters (got none)"),
        ("model chats.jsonl --eval-every 3", "evaluations need rows"),
        ("model chats.jsonl --scheduler greedy", "follows the loss of evaluations"),
        ("model chats.jsonl --update in_backward --clip 0 --accumulate 2", "in every backward pass (got accumulate=2)"),
        ("model chats.jsonl --update in_backward", "max_grad_norm needs all gradients"),
        ("model chats.jsonl --held-out 12 --seq 32", "got 12 of 12"),
        ("model chats.jsonl --held-out 2 --eval-data chats.jsonl", "rows of its own file or on rows that are held out"),
        ("model chats.jsonl --batch 0", "batch must be a whole number of at least 1"),
        (
            "model nowhere.jsonl --seed 4294967296",
            "seed must be below 2**32, for NumPy takes no other (got 4294967296)",
        ),
        ("model chats.jsonl --epochs 0", "epochs must be a positive number"),
        ("model chats.jsonl --lr nan", "lr must be a positive number"),
        ("model chats.jsonl --warmup 1.5", "warmup must be whole steps, or a share below 1"),
        ("model chats.jsonl --lora 0", "rank must be a whole number"),
        ("model chats.jsonl --lora-dropout 1 --lora", "lora_dropout must be a probability below 1"),
        ("model chats.jsonl --targets , --lora", "targets must be names"),
        ("model chats.jsonl --wandb mine --seq 32", "wandb is not installed"),
        ("model chats.jsonl --seq 32 --save chats.jsonl", "save must be a folder"),
        ("model chats.jsonl --seq 32 --save runs/a --out runs/a", "and out='runs/a', which is the same"),
        ("model chats.jsonl --seq 32 --save runs", "other outputs (got save='runs' and out='runs/"),
        ("model chats.jsonl --seq 32 --save new --log new/log.txt", "log='new/log.txt', which is in it"),
        ("model chats.jsonl --seq 32 --save new --store new/store", "store='new/store', which is in it"),
        ("model chats.jsonl --seq 32 --save full", "a folder to save in must be new, empty or hold a model"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_made(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    (place / "run.yaml").write_text(FILE)
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    before = sorted(place.rglob("*"))
    assert message in refused(capsys, *words.split(), "--device", "cpu")
    assert sorted(place.rglob("*")) == before


@pytest.fixture
def bad(place: Path) -> Path:
    """Returns a folder with what cannot be trained on, or from, each in a file of its own."""
    small.folder(place / "plain", template=None)
    rows = small.chats(3)
    small.write_lines(place / "lacking.jsonl", [*rows, {"prompt": "w1"}])
    small.write_lines(place / "silent.jsonl", [rows[0], {"messages": rows[1]["messages"][:1]}])
    small.write_lines(place / "long.jsonl", [{"text": small.words(0, count)} for count in (4, 5, 60)])
    whole = (place / "chats.jsonl").read_text()
    (place / "cut.jsonl").write_text(whole[: whole.rindex("content")])
    other = peft.get_peft_model(small.model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    other.save_pretrained(place / "other")
    tensors = safetensors.torch.load_file(place / "other" / "adapter_model.safetensors")
    deeper = {name.replace("layers.2.", "layers.9."): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(deeper, place / "other" / "adapter_model.safetensors")
    quantised = stronghold.load(place / "model", quantize="nf4", dtype=torch.bfloat16, device="cpu", window=1)
    quantised.save_pretrained(place / "nf4")
    stronghold.close(quantised)
    small.tokenizer().save_pretrained(place / "nf4")
    tensors = safetensors.torch.load_file(place / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    shutil.copytree(place / "model", place / "float8")
    safetensors.torch.save_file(tensors, place / "float8" / "model.safetensors", {"format": "pt"})
    shutil.copytree(place / "model", place / "short")
    content = (place / "short" / "model.safetensors").read_bytes()
    (place / "short" / "model.safetensors").write_bytes(content[:-1000])
    return place


BAD = [
    ("plain chats.jsonl", "messages need the model's chat template (at chats.jsonl:1: the tokenizer of 'plain'"),
    ("model lacking.jsonl", 'must have a prompt and a completion (at lacking.jsonl:4: no "completion")'),
    ("model silent.jsonl", 'must have something to learn (at silent.jsonl:2: "messages" has none'),
    ("model long.jsonl", "(at long.jsonl:3: 61 tokens, the sequence has 32"),
    ("model cut.jsonl", "cut.jsonl:12: Unterminated string"),
    ("model chats.jsonl --adapter other", "must be of the model that is trained (at other/adapter_model.safetensors: "),
    (
        "nf4 chats.jsonl",
        "quantised weights cannot be trained (at nf4/model.safetensors: model.layers.0.mlp.down",
    ),
    ("float8 chats.jsonl", "(at float8/model.safetensors: lm_head.weight is F8_E4M3)"),
    ("short chats.jsonl", "cannot read 'short/model.safetensors'"),
]


def test_bad_input_is_told_with_its_file_and_line_before_anything_is_made(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(bad.rglob("*"))
    for words, message in BAD:
        assert message in refused(capsys, *words.split(), "--seq", "32", "--device", "cpu"), words
    assert sorted(bad.rglob("*")) == before


def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert cli.main(["finetune", "model", "chats.jsonl", "--seq", "32"]) != 0
    told = capsys.readouterr().err
    assert "this needs trl, which is not installed; pip install '.[finetune]' in the project's root" in told


def test_several_processes_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process fine-tunes (got 2 of them)" in refused(capsys, "model", "chats.jsonl")


def test_every_default_is_of_an_option() -> None:
    assert DEFAULTS.keys() <= cli._parser().parse_args(["finetune", "m", "d"]).actions.keys()


def started(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "stronghold", "finetune", *words]
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_a_run_from_the_shell_is_interrupted_and_goes_on(place: Path) -> None:
    words = ["model", "chats.jsonl", "--seq", "32", "--window", "1", "--batch", "1", "--epochs", "200", "--out", "o"]
    process = started(*words)
    log = place / "o" / "log.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and log.read_text().count('"event": "step"') > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == INTERRUPTED, err
    assert "ending after this step; once more to quit at once" in err
    assert "to go on: the same command with --resume --out o" in out
    assert not (place / "o" / "model").exists()
    (kept,) = (place / "o").glob("checkpoint-*")
    step = int(kept.name.split("-")[1])
    # Of a run that is begun with as many epochs, for what it learns depends on them.
    process = started(*words, "--resume")
    while f'"step": {step + 3},' not in log.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == INTERRUPTED, err
    assert f"resume     from o/checkpoint-{step}, after step {step}" in out
    lines = [line for line in log.read_text().splitlines() if '"event": "step"' in line]
    assert len(lines) >= step + 3
    assert len({line.partition('"step": ')[2].partition(",")[0] for line in lines}) == len(lines)


def test_it_trains_and_saves(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run.yaml").write_text("model: model\ndata: chats.jsonl\nseq: 32\nwindow: 1\nsteps: 3\nbatch: 2\nout: o\n")
    assert cli.main(["finetune", "run.yaml", "--save", "tuned", "--device", "cpu"]) == 0
    assert "model saved in tuned, with the tokenizer" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained("tuned").config.num_hidden_layers == 3
    assert cli.main(["report", "o", "-o", "page.html"]) == 0  # its log is one that the page of results reads
    cells = re.findall(r"<td[^>]*>(.*?)</td>", Path("page.html").read_text())
    assert cells[:3] == ["stronghold finetune", "8.6 k (model)", "1"]
    assert capsys.readouterr().err.count("note: ") == 1  # that there is no timeline


def test_the_tutorial_runs_from_its_first_command_to_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "tutorials" / "finetune.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: laptop())
    small.folder(tmp_path / "Qwen3-8B", "qwen3", longest=2048)
    names: dict[str, Any] = {"transformers": transformers, "peft": peft}
    (text,) = (block for language, block in blocks if language == "yaml")
    (tmp_path / "run.yaml").write_text(text)
    write, load = (block for language, block in blocks if language == "python")
    exec(write, names)
    commands = [shlex.split(line, comments=True) for language, block in blocks if language == "bash"
                for line in block.splitlines()]  # fmt: skip
    assert [words[:2] for words in commands] == [["stronghold", "finetune"]] * 4
    for words in commands[:3]:
        assert cli.main([*words[1:], "--device", "cpu"]) == 0, capsys.readouterr().err
    exec(load, names)
    assert isinstance(names["adapted"], peft.PeftModel)
    assert "checkpoint-2" in {path.name for path in Path("runs/chats").iterdir()}
    assert cli.main([*commands[3][1:], "--device", "cpu"]) == 0
    assert "after step 2" in capsys.readouterr().out
    assert '"event": "evaluation"' in Path("runs/by-file/log.jsonl").read_text()
