"""Trials: what they take is counted with their children's, and the search tries what it says."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stronghold.lab.records.trials import Limits, Memory, exit_reason, search, watch


@pytest.mark.parametrize(
    ("largest_passing", "first", "most", "expected"),
    [
        (11, 4, 1024, [4, 8, 16, 12, 10, 11]),
        (0, 1, 1024, [1]),
        (0, 4, 1024, [4, 2, 1]),
        (3, 8, 1024, [8, 4, 2, 3]),
        (1000, 1, 8, [1, 2, 4, 8]),
        (1000, 3, 8, [3, 6, 8]),
        (7, 1, 8, [1, 2, 4, 8, 6, 7]),
    ],
)
def test_the_search_doubles_and_then_halves(largest_passing, first, most, expected):
    tried = []

    def passes(layers):
        tried.append(layers)
        return layers <= largest_passing

    assert search(passes, first, most) == min(largest_passing, most)
    assert tried == expected


@pytest.mark.parametrize(
    ("largest_passing", "expected", "found"),
    [
        (109, [64, 128, 96, 112, 104, 108], 108),
        (111, [64, 128, 96, 112, 104, 108], 108),
        (2, [8, 4, 2], 2),
        (0, [8, 4, 2, 1], 0),
    ],
)
def test_a_coarse_search_ends_within_its_grain_but_finds_what_is_small(largest_passing, expected, found):
    tried = []

    def passes(layers):
        tried.append(layers)
        return layers <= largest_passing

    assert search(passes, expected[0], 256, grain=4) == found
    assert tried == expected


def test_memory_counts_a_child_and_what_was_freed_again():
    script = (
        "import subprocess, sys, time\n"
        "block = b'x' * (90 << 20); del block\n"
        "subprocess.run([sys.executable, '-c', 'import time; b = b\"x\" * (50 << 20); time.sleep(3)'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    memory = Memory(process.pid)
    while process.poll() is None:
        memory.poll()
        time.sleep(0.05)
    assert 140 * 2**20 < memory.peak_bytes < 190 * 2**20


def test_a_trial_over_a_limit_is_killed_and_says_which(tmp_path):
    limits = {"memory_bytes": 2**30, "disk_bytes": 2**30, "time_s": 60.0}
    for limit, value, reason in (
        ("memory_bytes", 2**20, "over the limit of memory"),
        ("disk_bytes", 0, "over the limit of disk"),
        ("time_s", 0.2, "not done after 200 ms"),
    ):
        (tmp_path / "file").write_bytes(b"x" * 9000)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(50)"])
        begin_s = time.monotonic()
        watched = watch(process, Limits(**limits | {limit: value}), tmp_path)
        assert (watched.reason, process.returncode) == (reason, -9)
        assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (0, "stronghold: error: not one", ""),
        (2, "one\nerror: two\n\n", "ended with 2: error: two"),
        (1, "step 1\nstronghold: error: step 2 failed\nnanobind: leaked 4 types!\n", "ended with 1: step 2 failed"),
        (-9, "", "ended with -9: no message"),
    ],
)
def test_the_error_that_a_trial_told_is_why_it_failed_else_its_last_line(code, said, reason):
    assert exit_reason(code, said) == reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_while_nothing_else_is_done(number, tmp_path):
    done = []

    class Process:
        pid = os.getpid()

        def poll(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # a handler that raised would do so here
            done.append("polled")

    def stop(*_):
        done.append("stopped")
        raise SystemExit

    before = signal.signal(number, stop)
    try:
        with pytest.raises(SystemExit):
            watch(Process(), Limits(memory_bytes=2**50, disk_bytes=2**50, time_s=10), tmp_path)
        assert done == ["polled", "stopped"]
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), number)  # and behind it again at once
            time.sleep(1)
    finally:
        signal.signal(number, before)
