"""One process of several is killed, stopped, hangs or fails: the others end soon, with one error that names it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

from stronghold.version import __version__
from tests.distributed.launched import start
from tests.distributed.test_training import TRAIN, run_warm

PROGRAM = [*TRAIN[1:], "--checkpoint-every", "2"]
STAGES, REPLICAS = ("--stages", "2"), ("--replicas", "2")


@pytest.mark.parametrize(
    ("parts", "fault", "rank", "where", "named"),
    [
        pytest.param(STAGES, "kill", 1, "forward", "process 1 ", marks=pytest.mark.long),
        (STAGES, "kill", 0, "forward", "process 0"),
        pytest.param(STAGES, "kill", 1, "beginning", "process 1 ", marks=pytest.mark.long),
        pytest.param(STAGES, "stop", 1, "update", "process 1 ", marks=pytest.mark.long),
        (STAGES, "hang", 0, "update", "process 0 hangs"),
        pytest.param(STAGES, "raise", 1, "forward", "division by zero", marks=pytest.mark.long),
        (STAGES, "poison", 1, "forward", "the loss must stay finite"),
        pytest.param(REPLICAS, "kill", 1, "forward", "process 1 ", marks=pytest.mark.long),
        pytest.param(REPLICAS, "hang", 1, "forward", "process 1 hangs", marks=pytest.mark.long),
        pytest.param(REPLICAS, "raise", 1, "update", "division by zero", marks=pytest.mark.long),
        (REPLICAS, "raise", 1, "beginning", "division by zero"),
        pytest.param(
            STAGES,
            "0.9",
            1,
            "version of stronghold",
            f"(got '{__version__}' in process 0 and '0.9' in process 1)",
            marks=pytest.mark.long,
        ),
        (STAGES, "2.0", 0, "version of PyTorch", f"(got '2.0' in process 0 and '{torch.__version__}' in process 1)"),
    ],
)
def test_the_others_end_with_one_error_that_names_it(tmp_path, parts, fault, rank, where, named):
    begin = time.monotonic()
    program = [*PROGRAM, *parts, "--out", str(tmp_path / "run")]
    command = ["-m", "tests.distributed.faulty", fault, str(rank), where, *program]
    codes, said = start(command, 2, tmp_path, left=[rank] if fault == "stop" else [])
    assert time.monotonic() - begin < 60
    assert 0 not in codes
    errors = [line for text in said for line in text.splitlines() if line.startswith("stronghold: error: ")]
    assert len(errors) == 1 and named in errors[0], "\n".join(said)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("kill", "process 1 "),
        pytest.param("hang", "process 1 hangs", marks=pytest.mark.long),
        ("unpicklable", "who can send a lambda?"),
    ],
)
def test_what_befalls_a_process_in_a_distributed_checkpoint_is_told(tmp_path, fault, named):
    begin = time.monotonic()
    command = ["-m", "tests.distributed.launched", "tests.distributed.saved", "save_with_fault", str(tmp_path)]
    codes, said = start([*command, str(tmp_path), fault], 2, tmp_path)
    assert time.monotonic() - begin < 60
    assert 0 not in codes
    everything = "\n".join(said)
    assert named in everything, everything
    assert not (tmp_path / "saved").exists()


@pytest.fixture
def taken():
    """A port at which somebody listens."""
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_refused_by_one_process(tmp_path, taken):
    command = ["-m", *TRAIN, "--stages", "2", "--out", str(tmp_path / "run")]
    codes, said = start(command, 2, tmp_path, left=[1], port=taken)  # which a launcher would end
    errors = [line for text in said for line in text.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0].startswith("stronghold: error: "), "\n".join(said)
    assert f"(got {taken}, which is in use" in errors[0] and "another --master-port, or with --standalone" in errors[0]
    assert codes[0] == 2 and not (tmp_path / "run").exists()


@pytest.mark.long
def test_torchrun_itself_refuses_a_port_in_use_and_leaves_nothing_running(tmp_path, taken):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(taken), "-m", "--"]
    command = [sys.executable, *launcher, *TRAIN, "--stages", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and "EADDRINUSE" in done.stderr
    assert not (tmp_path / "run").exists()
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path / "run") in command for command in running)


@pytest.mark.parametrize("parts", [STAGES, pytest.param(REPLICAS, marks=pytest.mark.long)])
def test_a_restart_by_torchrun_goes_on_from_the_last_checkpoint_with_the_same_losses(tmp_path, parts):
    run_warm(tmp_path, "--out", str(tmp_path / "alone"), "--record", str(tmp_path / "alone.jsonl"))
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
    program = ["tests.distributed.faulty", "kill", "1", "checkpoint", *PROGRAM, *parts, *out]
    more = ["--resume", "--record", str(tmp_path / "staged.jsonl")]
    done = subprocess.run([sys.executable, *launcher, *program, *more], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [json.loads((tmp_path / name).read_text())["losses"] for name in ("alone.jsonl", "staged.jsonl")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
