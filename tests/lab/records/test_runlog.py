"""What a run writes: three logs that say the same."""

import errno
import json
import os
import threading
import time

import pytest

from stronghold.lab.records.runlog import RunLog
from stronghold.lab.records.runs import read_run, summarize

START = {
    "settings": {"method": "stronghold", "batch": 4, "sequence": 100, "source": None},
    "machine": {"commit": "abc", "host": {"cores": 2}},
    "parameters": 1000,
}
STEP = {
    "step": 1,
    "loss": 10.5,
    "lr": 3e-4,
    "batch": 4,
    "iteration_s": 2.0,
    "device_bytes": 2**20,
    "host_bytes": 2**30,
    "peak_device_bytes": 0,
    "peak_host_bytes": 2**31,
}


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_all_three_hold_the_run(tmp_path):
    text = tmp_path / "results" / "log.txt"
    with RunLog(tmp_path / "run", text=text) as log:
        log.start(START)
        log.step(STEP)
        assert len(read_run(tmp_path / "run").steps) == 1, "a step must be on disk before the next begins"
        assert "step      1" in text.read_text()
        log.step(STEP | {"step": 2, "loss": 9.25})
        log.end({"interrupted": False}, summarize(START, [STEP]))
    run = read_run(tmp_path / "run")
    assert run.start == {"event": "start", **START}
    assert [record["loss"] for record in run.steps] == [10.5, 9.25]
    assert run.end["summary"]["iteration_s"] == 2.0
    assert events(tmp_path / "run")["step/loss"] == [(1, 10.5), (2, 9.25)]
    lines = text.read_text().splitlines()
    assert "settings  method             stronghold" in lines
    assert 'machine   host               {"cores": 2}' in lines
    assert any(
        line.startswith("step      2  loss 9.250000  lr 3.000e-04  iteration 2.00 s  samples/s 2 ") for line in lines
    )
    assert any("TFLOPS with recomputation" in line for line in lines)


def test_a_folder_with_a_run_is_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="must not hold another run"):
        RunLog(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == "{}\n"


def test_a_full_disk_is_named_and_the_other_log_is_whole(tmp_path):
    refusal = pytest.raises(OSError, match=r"cannot write the log .*No space left.*/dev/full")
    with refusal, RunLog(tmp_path / "run", text="/dev/full") as log:
        log.start(START)
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text())["parameters"] == 1000


def test_what_tensorboard_s_thread_fails_with_is_told_once(tmp_path, monkeypatch, capsys):
    """It was told with a traceback beside the error that ends the run."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    before = threading.excepthook
    with pytest.raises(OSError, match=rf"No space left on device.*{tmp_path.name}"), RunLog(tmp_path / "run") as log:
        for step in range(100):
            log.step({**STEP, "step": step})
            time.sleep(0.01)
    assert "Traceback" not in capsys.readouterr().err
    assert threading.excepthook is before


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the log.*file/run"):
        RunLog(tmp_path / "file" / "run")


def test_a_run_goes_on_after_a_step_and_drops_what_came_later(tmp_path):
    text = tmp_path / "log.txt"
    with RunLog(tmp_path / "run", text=text) as log:
        log.start(START)
        for step in (1, 2, 3):
            log.step(STEP | {"step": step})
            log.checkpoint({"step": step, "path": f"c{step}", "save_s": 0.5})
        log.end({"interrupted": False}, summarize(START, [STEP]))
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"event": "st')
    time.sleep(1.1)  # TensorBoard tells which of its files is the later one by the second
    with RunLog(tmp_path / "run", text=text, after=2) as log:
        assert [record["step"] for record in log.steps] == [1, 2]
        log.start(START | {"parameters": 7})
        log.step(STEP | {"step": 3, "loss": 1.0})
        log.sync()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("step")) for line in lines] == [
        *(("start", None), ("step", 1), ("checkpoint", 1), ("step", 2), ("checkpoint", 2), ("resume", 2), ("step", 3)),
    ]
    assert lines[5]["parameters"] == 7
    assert events(tmp_path / "run")["step/loss"] == [(1, 10.5), (2, 10.5), (3, 1.0)]
    assert text.read_text().count("checkpoint c") == 3
    assert text.read_text().count("\nstep ") == 4


def test_a_run_that_goes_on_without_a_step_or_a_log_begins(tmp_path):
    with RunLog(tmp_path) as log:
        log.start(START)
        log.step(STEP)
    for after in (0, 5):
        with RunLog(tmp_path, after=after) as log:
            assert log.steps == []
            log.start(START)
        assert [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == ["start"]
        (tmp_path / "log.jsonl").unlink()


def test_steps_whose_records_are_gone_are_told(tmp_path):
    """A run whose log was cut went on with a gap in it, and without a word."""
    with RunLog(tmp_path) as log:
        assert log.lost == ""
        log.start(START)
        for number in (1, 2, 3):
            log.step({**STEP, "step": number})
    with RunLog(tmp_path, after=3) as log:
        assert log.lost == ""
    with RunLog(tmp_path, after=4) as log:
        assert "has lost the records of step 4, whose training the checkpoint has" in log.lost
    with RunLog(tmp_path, after=1200) as log:
        assert f"{tmp_path}/log.jsonl has lost the records of 1,197 steps between 4 and 1200, whose" in log.lost


def test_a_full_disk_leaves_the_old_log_whole(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        log.start(START)
        log.step(STEP)
    before = (tmp_path / "log.jsonl").read_text()

    def refuse(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match=r"cannot write the log.*log\.jsonl"):
        RunLog(tmp_path, after=1)
    assert (tmp_path / "log.jsonl").read_text() == before
    assert not list(tmp_path.glob(".*"))
