"""Every option of every command with what it cannot take: exit code 2, one line that says why, and nothing is made."""

import os
import time

import pytest

from stronghold.lab import cli
from tests.planner.machines import laptop

SHAPE = ["-l", "2", "--hidden", "32", "--heads", "2", "--vocabulary", "256", "--seq", "32"]
TRAIN = ["train", *SHAPE, "--data", "text.txt", "--device", "cpu", "--batch", "2", "--steps", "2", "--out", "out"]
PARTITION = ["partition", *SHAPE, "--stages", "2", "--device", "cpu"]
COMMANDS = {
    "train": TRAIN,
    "partition": PARTITION,
    "probe": ["probe", "--device", "cpu", "--no-keep", "--seconds", "1"],
    "plan": ["plan", *SHAPE, "--batch", "2", "--machine", "machine.json"],
    "finetune": ["finetune", "folder", "text.txt", "--device", "cpu"],
    "plot": ["plot", "text.txt"],
    "report": ["report", "folder"],
    "trace": ["trace", "folder"],
}
HUGE = str(10**21)
COUNTS = ["--layers", "--hidden", "--heads", "--vocabulary", "--batch", "--seq", "--micro-batches", "--stages"]
WHOLE = {
    "train": [
        *COUNTS,
        *["--steps", "--micro-batch", "--replicas", "--checkpoint-every", "--keep-checkpoints", "--window"],
    ],
    "partition": [*COUNTS, "--processes", "--input"],
    "plan": [*COUNTS[:6], "--micro-batch", "--window", "--cores", "--nodes", "--devices-per-node"],
    "finetune": [
        *["--seq", "--lora", "--steps", "--batch", "--accumulate", "--eval-every", "--window", "--micro-batch"],
        *["--checkpoint-every", "--keep-checkpoints"],
    ],
}
ZERO_TOO = {"train": ["--held-out", "--warmup", "--seed", "--resident"]}
ZERO_TOO["finetune"] = ["--held-out", "--seed", "--resident"]
REAL = {"train": ["--dropout", "--lr", "--weight-decay", "--clip"], "partition": ["--dropout"], "probe": ["--seconds"]}
REAL["plan"] = ["--dropout", "--tokens"]
REAL["finetune"] = [
    *["--lora-alpha", "--lora-dropout", "--epochs", "--lr", "--warmup", "--weight-decay", "--clip"],
    "--scheduler-options",
]
SIZES = {"train": ["--device-limit", "--device-memory", "--host-memory"], "partition": ["--memory"]}
SIZES["plan"] = SIZES["finetune"] = ["--device-memory", "--host-memory"]
NAMED = {
    "train": [
        "--device",
        "--method",
        "--dtype",
        "--activations",
        "--update",
        "--states",
        "--nonfinite",
        "--schedule",
        "--balance",
    ],
    "partition": ["--device", "--dtype", "--activations", "--schedule", "--balance"],
    "probe": ["--device"],
    "plan": ["--device", "--dtype", "--activations", "--update", "--states"],
    "finetune": [
        *["--device", "--dtype", "--activations", "--update", "--states", "--loss", "--long-rows", "--scheduler"],
        "--wandb",
    ],
}
READ = {
    "train": ["--data", "--tokenizer", "--model", "--plan"],
    "partition": ["--file", "--machine"],
    "plan": ["--machine", "--profile"],
    "finetune": ["--adapter", "--eval-data"],
}
FILES = {
    "train": ["--log", "--record"],
    "finetune": ["--log"],
    "plan": ["--output", "--picture"],
    **{one: ["--output"] for one in ("partition", "probe", "plot", "report", "trace")},
}
PAGES = {"plan": ["--picture"], "report": ["--output"]}
FOLDERS = {"train": ["--out", "--save", "--store"], "probe": ["--disk"], "plan": ["--disk"]}
FOLDERS["finetune"] = ["--out", "--save"]
TOO_LONG = "a" * 300
VALUES = [
    (WHOLE, ("", "0", "-1", "nan", "2.5", "x", HUGE, "9" * 5000)),
    (ZERO_TOO, ("", "-1", "nan", "2.5", HUGE, "9" * 5000)),
    (REAL, ("", "-1", "nan", "inf", "-inf", "1e400", "x")),
    (SIZES, ("", "-1", "nan", "inf", "x")),
    (NAMED, ("", "x")),
    (READ, ("", "nowhere", "text.txt/below", TOO_LONG, "a\0b", "/dev/zero")),
    (FILES, ("", "folder", "text.txt/below", TOO_LONG, "a\0b", "new/", "/proc/nowhere", "/proc/nowhere/below")),
    (PAGES, ("page.png", "page.SVG")),
    (FOLDERS, ("", "text.txt", "text.txt/below", TOO_LONG, "a\0b", "/proc/nowhere")),
]
WRONG = [
    pytest.param(command, option, value, id=f"{command}{option}={value[:12]!a}")
    for table, values in VALUES
    for command, options in table.items()
    for option in options
    for value in values
]
WRONG += [
    pytest.param(command, "", value, id=f"{command} {value[:12]!a}")
    for command in ("plot", "report", "trace")
    for value in ("", "nowhere", "text.txt/below", TOO_LONG, "a\0b", "/dev/zero")
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    laptop().write(tmp_path / "machine.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    return tmp_path


def found(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def call(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(("command", "option", "value"), WRONG)
def test_it_is_refused_in_one_line_and_nothing_is_made(here, capsys, command, option, value):
    arguments = [*COMMANDS[command], option, value] if option else [command, value]
    if option == "--model":
        arguments = [one for place, one in enumerate(arguments) if place == 0 or place > 2 * (len(SHAPE) // 2)]
    before, begin_s = found(here), time.process_time()
    code = call(arguments)
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("stronghold: error: ") and error.count("\n") == 1 and len(error) < 1200
    assert found(here) == before
    assert time.process_time() - begin_s < 10  # before any long work; what other processes take does not count


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--layers", str(10**9)], "layers must be at most 65,536"),
        (["--vocabulary", str(10**15)], "a model must have at most 2**50 parameters"),
        (["--batch", str(10**12)], "the ids of a batch, 8 bytes for each token, must fit the memory"),
        (["--steps", HUGE], "must be a whole number of at most 9223372036854775807"),
        (["--log", "/proc/nowhere"], "log must be a file that can be written (got '/proc/nowhere': "),
        (["--save", "text.txt/below"], "save must be a folder that can be written (got 'text.txt/below': "),
        (["--out", ""], "argument --out: must be a path (got '')"),
        (["--data", "/dev/zero"], "argument --data: must be a file or a folder (got the device '/dev/zero')"),
    ],
)
def test_the_line_tells_the_rule_and_the_value(here, capsys, arguments, rule):
    assert call([*TRAIN, *arguments]) == 2
    assert rule in capsys.readouterr().err


def test_what_can_be_written_is_taken_and_keeps_its_content(here):
    (here / "log").write_text("mine")
    assert call([*TRAIN, "--record", "new/runs.jsonl", "--log", os.devnull, "--save", "new/model"]) == 0
    assert (here / "new" / "model" / "config.json").exists() and (here / "log").read_text() == "mine"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_no_argument_takes_is_told_with_the_commands_own_help(here, capsys, command):
    assert call([*COMMANDS[command], "--nonsense"]) == 2
    assert f"unrecognized arguments: --nonsense; see stronghold {command} --help" in capsys.readouterr().err
