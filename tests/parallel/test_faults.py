"""One process of several is killed, stopped, hangs or fails: the others end soon, with one error that names it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.parallel.launched import start
from tests.parallel.test_training import TRAIN, run

PROGRAM = [*TRAIN[1:], "--checkpoint-every", "2"]
STAGES, REPLICAS = ("--stages", "2"), ("--replicas", "2")


@pytest.mark.parametrize(
    ("parts", "fault", "rank", "where", "named"),
    [
        (STAGES, "kill", 1, "forward", "process 1 "),
        (STAGES, "kill", 0, "forward", "process 0"),
        (STAGES, "kill", 1, "beginning", "process 1 "),
        (STAGES, "stop", 1, "update", "process 1 "),
        (STAGES, "hang", 0, "update", "process 0 hangs"),
        (STAGES, "raise", 1, "forward", "division by zero"),
        (STAGES, "poison", 1, "forward", "the loss must stay finite"),
        (REPLICAS, "kill", 1, "forward", "process 1 "),
        (REPLICAS, "hang", 1, "forward", "process 1 hangs"),
        (REPLICAS, "raise", 1, "update", "division by zero"),
    ],
)
def test_the_others_end_with_one_error_that_names_it(tmp_path, parts, fault, rank, where, named):
    begin = time.monotonic()
    program = [*PROGRAM, *parts, "--out", str(tmp_path / "run")]
    command = ["-m", "tests.parallel.faulty", fault, str(rank), where, *program]
    codes, said = start(command, 2, tmp_path, left=[rank] if fault == "stop" else [])
    assert time.monotonic() - begin < 60
    assert 0 not in codes
    errors = [line for text in said for line in text.splitlines() if line.startswith("stronghold: error: ")]
    assert len(errors) == 1 and named in errors[0], "\n".join(said)


@pytest.mark.parametrize("parts", [STAGES, REPLICAS])
def test_a_restart_by_torchrun_goes_on_from_the_last_checkpoint_with_the_same_losses(tmp_path, parts):
    run("--out", str(tmp_path / "alone"), "--record", str(tmp_path / "alone.jsonl"))
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "-m",
        "--",
    ]
    out = ["--out", str(tmp_path / "run")]
    program = ["tests.parallel.faulty", "kill", "1", "checkpoint", *PROGRAM, *parts, *out]
    more = ["--resume", "--record", str(tmp_path / "staged.jsonl")]
    done = subprocess.run([sys.executable, *launcher, *program, *more], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [json.loads((tmp_path / name).read_text())["losses"] for name in ("alone.jsonl", "staged.jsonl")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
