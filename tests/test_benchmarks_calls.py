"""What benchmarks/calls.py makes of a run: its record and steps, why it failed, and that it ends in time."""

import importlib
import time
from pathlib import Path

import psutil
import pytest

from stronghold.lab.records.timeline import read_spans

TINY = ["-l", "2", "--hidden", "32", "--heads", "2", "--vocabulary", "512", "--seq", "16", "--batch", "2"]


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module("calls")


@pytest.fixture
def program(calls, monkeypatch, tmp_path):
    """Has a shell script run in the place of Python, with the same arguments."""

    def replace(script):
        file = tmp_path / "program"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(calls.sys, "executable", str(file))

    return replace


def test_a_run_gives_its_record_its_steps_and_its_timeline(calls, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    call = calls.train(
        [*TINY, "--steps", "4", "--device", "cpu"], scratch=str(scratch), timeout_s=200, keep=tmp_path / "kept" / "run"
    )
    assert (call.reason, call.late) == ("", False)
    assert [step["step"] for step in call.steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in call.steps] == call.record["losses"]
    assert all(step["compute_s"] > 0 for step in call.steps)
    assert call.record["summary"]["steps"] == 4
    assert {span.lane for span in read_spans(tmp_path / "kept" / "run.timeline.json")} >= {"compute", "updates"}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["run.timeline.json"]
    assert list(scratch.iterdir()) == []


def test_a_run_that_is_refused_says_why_and_leaves_what_it_said(calls, tmp_path):
    call = calls.train([*TINY, "--device", "cpu", "--device-limit", "1GiB"], keep=tmp_path / "run")
    assert call.record is None
    assert call.reason.startswith("device_limit is of a GPU's memory")
    assert (tmp_path / "run.txt").read_text().startswith(f"stronghold: error: {call.reason}")


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (0, "stronghold: error: not one\n", ""),
        (1, "step 1\nstronghold: error: step 2 failed\n[W1 x.cpp] a last word\n", "step 2 failed"),
        (-9, "", "ended with -9: no message"),
        (1, "one\nSegmentation fault\n", "ended with 1: Segmentation fault"),
    ],
)
def test_the_error_is_the_reason_whatever_comes_behind_it(calls, code, said, reason):
    assert calls.failure(code, said) == reason


def test_a_run_that_hangs_is_ended_with_its_children(calls, program, tmp_path):
    program(f"sleep 100 & echo $! > {tmp_path}/child; wait")
    begin_s = time.monotonic()
    call = calls.train([], timeout_s=1.0)
    assert (call.record, call.reason, call.late) == (None, "not done after 1.00 s", True)
    assert 1.0 <= call.wall_s <= time.monotonic() - begin_s < 20
    child = int((tmp_path / "child").read_text())
    for _ in range(500):  # it was killed, and dies when the system comes to it
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child still runs")


def test_a_budget_allows_a_call_as_long_as_the_longest(calls):
    now = [100.0]
    budget = calls.Budget(60.0, clock=lambda: now[0])
    assert budget.allows()
    budget.took(20.0)
    budget.took(5.0)
    now[0] = 139.0
    assert budget.left_s == 21.0
    assert budget.allows()
    assert not budget.allows(times_longest=1.1)
    now[0] = 140.0
    assert not budget.allows()


def test_the_spread_of_one_value_is_that_value(calls):
    assert calls.spread([2.0]) == {"low": 2.0, "median": 2.0, "high": 2.0}
    assert calls.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"low": 2.0, "median": 3.0, "high": 4.0}
