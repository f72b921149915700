"""What ends a run early: signals and a lost terminal or reader, each with what was learned so far saved."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stronghold.lab.models.files import load_model
from stronghold.lab.records.runs import read_run
from stronghold.lab.stops import HUNG_UP, Output, Stop, ending_at_signals, taking_signals

ROOT = Path(__file__).parents[2]
SHAPE = ["-l", "2", "--hidden", "32", "--heads", "2", "--vocabulary", "256", "--seq", "32", "--batch", "2"]


@pytest.fixture
def started(tmp_path):
    """Starts an endless run, waits for its third step, and ends it in any case."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    processes = []

    def start(prefix=(), steps="1000000", **streams):
        out = str(tmp_path / "out")
        wanted = [*SHAPE, "--data", str(tmp_path / "text.txt"), "--device", "cpu", "--steps", steps, "--out", out]
        command = [*prefix, sys.executable, "-m", "stronghold", "train", *wanted]
        processes.append(subprocess.Popen(command, cwd=ROOT, preexec_fn=_heed, **streams))
        wait_for_steps(tmp_path / "out" / "log.jsonl", 3, processes[0])
        return processes[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _heed():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, which a run heeds, the tests would not be heard


def steps(log):
    return log.read_text().count('"event": "step"') if log.exists() else 0


def wait_for_steps(log, count, process):
    end = time.monotonic() + 120
    while steps(log) < count:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def check_saved(folder):
    run = read_run(folder)
    assert run.end["interrupted"] is True and len(run.steps) >= 3
    assert load_model(folder / "model")[1]


def test_sighup_saves_what_was_learned_and_a_second_one_does_not_hinder_it(started, tmp_path):
    process = started(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for _ in range(5):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.002)
    shown = process.communicate(timeout=60)[0].decode()
    assert process.returncode == HUNG_UP == 129, shown
    assert shown.count("ending after this step") == 1 and "model saved in" in shown and "Traceback" not in shown
    check_saved(tmp_path / "out")


def test_a_terminal_that_is_closed_ends_the_run_with_the_model_saved(started, tmp_path):
    near, far = pty.openpty()
    threading.Thread(target=drain, args=(near,), daemon=True).start()
    process = started(prefix=["setsid", "--ctty"], stdin=far, stdout=far, stderr=far)
    os.close(far)
    os.close(near)
    assert process.wait(60) == HUNG_UP
    check_saved(tmp_path / "out")


def drain(terminal):
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # it is closed
        return


def test_a_reader_who_has_gone_ends_the_run_with_the_model_saved(started, tmp_path):
    process = started(steps="200", stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # a line for each tenth of them
    process.stdout.close()
    told = process.stderr.read().decode()
    assert process.wait(60) == HUNG_UP
    assert told == ""
    check_saved(tmp_path / "out")


def test_a_run_under_nohup_goes_on(started, tmp_path):
    process = started(prefix=["nohup"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    log = tmp_path / "out" / "log.jsonl"
    wait_for_steps(log, steps(log) + 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130


def test_the_first_signal_decides_and_handlers_are_put_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    stop = Stop()
    with taking_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert (stop.asked, stop.exit_code) == (True, 130)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGHUP, HUNG_UP)])
def test_a_signal_leaves_what_is_measured_by_its_end_and_handlers_are_put_back(number, code):
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, signal.SIG_DFL) for one in numbers]  # under nohup SIGHUP would be ignored
    cleared = []
    try:
        with pytest.raises(SystemExit) as ended, ending_at_signals():
            try:
                os.kill(os.getpid(), number)
            finally:
                cleared.append(number)
        assert (ended.value.code, cleared) == (code, [number])
        assert [signal.getsignal(one) for one in numbers] == [signal.SIG_DFL] * 2
    finally:
        for one, handler in zip(numbers, before, strict=True):
            signal.signal(one, handler)


def test_a_probe_that_is_ended_leaves_no_folder_and_no_process(tmp_path):
    """SIGTERM left /tmp/stronghold-probe-… behind."""
    command = [sys.executable, "-m", "stronghold", "probe", "--no-keep", "--device", "cpu"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("stronghold-probe-*/store")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 130
    assert not os.listdir(tmp_path)


def test_an_output_that_fails_otherwise_is_an_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        output = Output(stop := Stop())
        output.write("x")
        with pytest.raises(OSError, match="No space left"):
            output.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert not stop.asked
