"""What a run writes: three logs that say the same."""

import json

import pytest

from stronghold.evaluation.runlog import RunLog
from stronghold.evaluation.runs import read_run, summarize

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


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the log.*file/run"):
        RunLog(tmp_path / "file" / "run")
