"""`stronghold train --stages` and `--replicas` under torchrun, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.distributed.launched import start

TINY = ["-l", "3", "--hidden", "32", "--heads", "2", "--vocabulary", "300", "--seq", "32", "--batch", "4"]
TRAIN = ["stronghold", "train", *TINY, "--steps", "6", "--window", "1", "--device", "cpu", "--held-out", "5"]


def run(*arguments: str, processes: int = 1, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, by torchrun where there is to be more than one process."""
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *TRAIN, *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done


def run_warm(folder: Path, *arguments: str, processes: int = 1, code: int = 0) -> list[str]:
    """Runs it to its end as torchrun would, but warm; returns what each process printed. ``code`` is the first's.

    One that has told what is wrong may be killed before it has ended, where another is faster at that.
    """
    command = ["-m", *TRAIN, *arguments]
    if processes > 1:
        codes, said = start(command, processes, folder, launcher=True)
    else:
        codes = warm.run(command, [{"OMP_NUM_THREADS": "1"}], [folder / "0.log"])
        said = [(folder / "0.log").read_text()]
    ends = {code, -signal.SIGKILL} if code and processes > 1 else {code}
    assert codes[0] in ends and (code or not any(codes)), "\n".join(said)
    return said


def record(path: Path) -> dict:
    (line,) = path.read_text().splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    run_warm(out, "--out", str(out / "run"), "--record", str(out / "record"))
    return record(out / "record")


def test_stages_have_the_losses_of_one_process_and_say_what_each_takes(alone, tmp_path):
    out = tmp_path / "run"
    said = run_warm(tmp_path, "--stages", "2", "--out", str(out), "--record", str(tmp_path / "record"), processes=2)
    staged = record(tmp_path / "record")
    assert staged["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert staged["summary"]["held_out_loss"] == pytest.approx(alone["summary"]["held_out_loss"], rel=1e-5)
    assert staged["parameters"] == alone["parameters"]
    assert "".join(said).count("step     1/6") == 1  # of one process
    assert "processes" in "".join(said)
    assert (out / "process-1" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        (["--replicas", "2", "--save", "model"], 2),
        pytest.param(
            ["--replicas", "2", "--stages", "2", "--store", "store", "--micro-batches", "2"], 4, marks=pytest.mark.long
        ),
    ],
)
def test_replicas_have_the_losses_of_one_process(alone, tmp_path, arguments, processes):
    arguments = [str(tmp_path / one) if one in ("model", "store") else one for one in arguments]
    more = ["--clip", "1", "--update", "deferred", "--record", str(tmp_path / "record")]
    run_warm(tmp_path, *arguments, *more, "--out", str(tmp_path / "run"), processes=processes)
    replicas = record(tmp_path / "record")
    assert replicas["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert replicas["summary"]["held_out_loss"] == pytest.approx(alone["summary"]["held_out_loss"], rel=1e-5)
    assert replicas["parameters"] == alone["parameters"]
    assert (tmp_path / "model" / "model.safetensors").exists() == (processes == 2)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--clip", "1"], marks=pytest.mark.long),
        ["--clip", "0", "--update", "in_backward", "--store", "store"],
    ],
)
def test_stages_of_replicas_have_the_losses_of_one_process_in_bf16(tmp_path, more):
    losses = []
    for name, parts, processes in (("alone", [], 1), ("parts", ["--replicas", "2", "--stages", "2"], 4)):
        out = ["--out", str(tmp_path / name), "--record", str(tmp_path / f"{name}.jsonl")]
        own = [str(tmp_path / f"{name}-store") if one == "store" else one for one in more]
        run_warm(tmp_path, "--dtype", "bf16", *own, *parts, *out, processes=processes)
        losses.append(record(tmp_path / f"{name}.jsonl")["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_run_in_stages_goes_on_in_one_process_and_the_other_way_round(alone, tmp_path):
    out, kept = tmp_path / "run", ["--checkpoint-every", "3", "--resume"]
    run_warm(tmp_path, "--stages", "2", "--out", str(out), *kept, processes=2)
    (out / "checkpoints" / "step-000006").rename(tmp_path / "later")
    (said,) = run_warm(tmp_path, "--out", str(out), *kept, "--record", str(tmp_path / "one"))
    assert "note       stages=1, which was 2: from here on sums may round, and dropout draws, in another way" in said
    assert record(tmp_path / "one")["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    (out / "checkpoints" / "step-000006").rename(tmp_path / "of one")
    run_warm(tmp_path, "--stages", "2", "--out", str(out), *kept, "--record", str(tmp_path / "two"), processes=2)
    assert record(tmp_path / "two")["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_a_run_in_stages_goes_on_with_the_micro_batches_that_it_began_with(tmp_path):
    """Of another number dropout draws for each, and gradients are other sums: losses were others without a word."""
    stages = ["--stages", "2", "--dropout", "0.2"]
    kept = [*stages, "--out", str(tmp_path / "run"), "--checkpoint-every", "3", "--resume"]
    run_warm(tmp_path, *kept, "--micro-batches", "2", "--record", str(tmp_path / "expected"), processes=2)
    (tmp_path / "run" / "checkpoints" / "step-000006").rename(tmp_path / "later")
    said = run_warm(tmp_path, *kept, "--micro-batches", "4", processes=2, code=2)
    check_refusal(said, "the settings it began with (got micro_batches=4, which was 2, in ")
    said = run_warm(tmp_path, *kept, "--record", str(tmp_path / "found"), processes=2)
    assert "note " not in said[0]
    assert record(tmp_path / "found")["losses"] == record(tmp_path / "expected")["losses"]
    assert record(tmp_path / "found")["settings"]["micro_batches"] == 2


@pytest.mark.parametrize(
    ("arguments", "processes", "rule"),
    [
        (["--stages", "4"], 2, "each stage needs at least one layer (got stages=4, layers=3); pass at most 3 stages"),
        (["--stages", "3"], 2, "the processes must divide the stages, and be two or more (got 2 for 3 stages)"),
        (["--stages", "2", "--balance", "1,1"], 2, "and 3 in all (got [1, 1]"),
        (["--stages", "2", "--micro-batches", "3"], 2, "the micro-batches must divide the batch (got micro_batches=3"),
        (["--stages", "2", "--save", "there"], 1, "kept in checkpoints, which load in one process too (got save="),
        (["--stages", "2"], 1, "start it with torchrun --nproc-per-node 2"),
        ([], 2, "a model in one stage and one replica is trained by one process (got 2 of them); pass --stages 2"),
        (["--replicas", "3"], 2, "the replicas must divide the batch (got batch=4, replicas=3)"),
        (["--replicas", "4"], 2, "the replicas must divide the processes (got 4 replicas and 2 processes)"),
        (["--stages", "2", "--replicas", "2", "--micro-batches", "4"], 4, "batch of a replica (got micro_batches=4"),
    ],
)
def test_what_cannot_be_is_refused_by_one_process(tmp_path, arguments, processes, rule):
    texts = run_warm(tmp_path, *arguments, "--out", str(tmp_path / "run"), processes=processes, code=2)
    check_refusal(texts, rule)


@pytest.mark.long
def test_it_is_so_by_torchrun_too(tmp_path):
    """Which kills the others when the first one ends."""
    done = run("--stages", "4", "--out", str(tmp_path / "run"), processes=2, code=1)
    check_refusal([done.stdout, done.stderr], "each stage needs at least one layer (got stages=4, layers=3)")


def check_refusal(texts: list[str], rule: str) -> None:
    lines = [line for text in texts for line in text.splitlines()]
    said = [line for line in lines if line.startswith("stronghold: ")]
    assert len(said) == 1 and rule in said[0], "\n".join(lines)
    assert not any("step" in line for line in lines if line not in said)


def test_stopping_ends_all_after_the_same_step_with_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    more = ["--stages", "2", "--steps", "100000", "--checkpoint-every", "50000", "--out", str(out)]
    with subprocess.Popen([sys.executable, *launcher, *TRAIN, *more], stdout=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not steps_of(out):
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    last = [steps_of(folder)[-1] for folder in (out, out / "process-1")]
    assert last[0] == last[1] and f"interrupted after step {last[0]} of 100000" in said
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{last[0]:06}"]


def steps_of(folder: Path) -> list[int]:
    log = folder / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [record["step"] for record in records if record["event"] == "step"]
