"""What is said and done of a process that is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import psutil
import pytest

from stronghold.distributed.activity import identity
from stronghold.distributed.lost import in_one_line, kill_stopped
from stronghold.errors import LostProcessError, ParallelError
from tests.distributed.launched import start


@pytest.mark.parametrize(
    ("error", "said", "passed_on"),
    [
        (LostProcessError("process 1 is lost"), "stronghold: error: process 1 is lost\n", False),
        (LostProcessError("process 1 is lost", ours=False), "", False),
        (ParallelError("replica 0 failed", ours=False), "", False),
        (ParallelError("replicas must compute the same"), "", True),
        (ValueError("the user's own"), "", True),
    ],
)
def test_the_loss_of_a_process_is_one_line_and_the_users_errors_keep_their_traceback(capsys, error, said, passed_on):
    seen: list[BaseException] = []
    in_one_line(lambda kind, error, traceback: seen.append(error))(type(error), error, None)
    assert capsys.readouterr().err == said
    assert seen == ([error] if passed_on else [])


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_is_stopped_is_killed_and_no_other(sleeper):
    pid, begun = known = identity(psutil.Process(sleeper.pid))
    kill_stopped(repr(known))
    assert sleeper.poll() is None, "it runs"
    sleeper.send_signal(signal.SIGSTOP)
    kill_stopped(repr((pid, begun - 1.0)))
    kill_stopped(None)
    assert sleeper.poll() is None, "it is another of the same number"
    while sleeper.poll() is None and psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED:
        pass
    kill_stopped(repr(known))
    assert sleeper.wait(10) == -signal.SIGKILL
    kill_stopped(repr(known))  # it has ended


@pytest.mark.parametrize(
    ("fault", "rank", "code", "named"),
    [
        pytest.param(
            "kill", 1, -signal.SIGKILL, "process 1 .* is lost: it was killed or stopped", marks=pytest.mark.long
        ),
        ("end", 1, 0, "process 1 .* has ended by itself, without an error, and others wait for it: .* as many batches"),
        ("stop", 1, -signal.SIGKILL, "process 1 .* is lost: it was killed or stopped"),
    ],
)
def test_beside_the_line_that_names_it_nothing_is_said(tmp_path, fault, rank, code, named):
    """In a program of the user's own, which does not catch our errors; a stopped process is not left to a launcher."""
    codes, said = start(["-m", "tests.distributed.ends", fault, str(rank)], 2, tmp_path)
    assert codes[rank] == code
    assert codes[1 - rank] == 1
    # PyTorch 2.9 says of each group that it is connected.
    connected = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. .*")
    lines = [line for text in said for line in text.splitlines() if not connected.fullmatch(line)]
    everything = [line for line in lines if "Warning" not in line]
    assert len(everything) == 1, "\n".join(said)
    assert re.match(f"stronghold: error: {named}", everything[0])
