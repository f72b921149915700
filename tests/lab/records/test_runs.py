"""Runs read from their logs, and their sums."""

import pytest

from stronghold.lab.records.json_lines import append_record
from stronghold.lab.records.runs import read_run, summarize

START = {"settings": {"method": "stronghold", "batch": 4, "sequence": 100}, "parameters": 10**9}


def step(number, seconds, loss=2.0):
    return {
        "step": number,
        "loss": loss,
        "iteration_s": seconds,
        "device_bytes": 50,
        "peak_device_bytes": 100 + number,
        "peak_host_bytes": 1000 - number,
    }


def test_the_summary_leaves_out_warm_up_and_takes_medians():
    steps = [step(1, 60.0, 9.0), step(2, 30.0), *(step(n, s) for n, s in enumerate((3, 1, 2, 5, 4), 3))]
    summary = summarize(START, steps, held_out_loss=2.5)
    assert (summary.iteration_s, summary.iteration_s_p10, summary.iteration_s_p90) == (3, 1, 5)
    assert (summary.samples_per_s, summary.tokens_per_s) == (4 / 3, 400 / 3)
    assert summary.tflops == pytest.approx(6 * 1e9 * 400 / 3 / 1e12)
    assert summary.tflops_with_recomputation == pytest.approx(8 * 1e9 * 400 / 3 / 1e12)
    assert (summary.peak_device_bytes, summary.peak_host_bytes) == (107, 999)
    assert (summary.first_loss, summary.last_loss, summary.held_out_loss) == (9.0, 2.0, 2.5)
    assert (summary.steps, summary.device_bytes) == (7, 50)


def test_the_speed_is_that_of_the_tokens_and_samples_that_steps_tell():
    """Of batches that are filled up to their longest row, and of several that are accumulated."""
    steps = [{**step(n, 2.0), "tokens": 10.0 * n, "batch": 8} for n in range(1, 6)]
    summary = summarize(START, steps)
    assert (summary.batch, summary.samples_per_s, summary.tokens_per_s) == (8, 4.0, 15.0)
    assert summary.tflops == pytest.approx(6 * 1e9 * 15.0 / 1e12)
    # It said "5 of 8 x 100 tokens", of steps of 30.
    assert ("", "steps", "5 of 8 samples of up to 100 tokens, 30 together") in summary.rows()
    assert ("", "steps", "1 of 4 x 100 tokens") in summarize(START, [step(1, 2.0)]).rows()
    with pytest.raises(ValueError, match="median"):
        summarize(START, [])


@pytest.mark.parametrize(("times", "median"), [([9], 9), ([9, 1], 1), ([9, 2, 1], 1.5), ([9, 8, 1, 3, 2], 2)])
def test_short_runs_leave_out_what_they_can(times, median):
    assert summarize(START, [step(n, s) for n, s in enumerate(times, 1)]).iteration_s == median


def test_its_rows_name_the_flops_they_count():
    rows = {name: value for _, name, value in summarize(START, [step(1, 2.0)]).rows()}
    assert rows["TFLOPS (6·N·tokens)"] == "1.2"
    assert rows["TFLOPS with recomputation (8·N·tokens)"] == "1.6"
    assert rows["samples/s"] == "2"
    assert rows["peak device bytes"] == "101 B"
    assert rows["parameters"] == "1 B (1,000,000,000)"
    assert "on held-out text" not in rows


def test_a_device_that_does_not_count_tells_what_it_holds():
    summary = summarize(START, [step(1, 2.0) | {"peak_device_bytes": 0}])
    assert ("memory", "peak device bytes", "not counted, 50 B held") in summary.rows()
    summary = summarize(START, [step(1, 2.0) | {"peak_device_bytes": 0, "device_bytes": 0}])
    assert ("memory", "peak device bytes", "not counted, not told apart from the host's") in summary.rows()


def test_what_is_on_disk_and_written_to_it_is_summed_up():
    steps = [step(n, 1.0) | {"disk_bytes": 2**20 * n, "disk_written_bytes": 2**20} for n in (1, 2, 3)]
    summary = summarize(START, steps)
    assert (summary.disk_bytes, summary.disk_written_bytes) == (3 * 2**20, 2**20)
    assert ("", "disk bytes", "3.00 MiB, 1.00 MiB written a step") in summary.rows()
    assert "disk bytes" not in {name for _, name, _ in summarize(START, [step(1, 1.0)]).rows()}


def write(path, *records):
    for record in records:
        append_record(path, record)


def test_a_run_is_read_from_its_folder_or_file(tmp_path):
    path = tmp_path / "mine" / "log.jsonl"
    write(path, {"event": "start", **START}, {"event": "step", **step(1, 2.0, "nan")})
    run = read_run(tmp_path / "mine")
    assert run == read_run(path)
    assert (run.name, len(run.steps), run.end) == ("mine", 1, None)
    assert run.start["parameters"] == 10**9
    with path.open("a") as file:
        file.write('{"event": "st')
    assert read_run(path).truncated.endswith("log.jsonl:3 was cut off and is left out")
    write(path, {"event": "end", "x": 1})
    assert read_run(path).end == {"event": "end", "x": 1}
    other = tmp_path / "other.jsonl"
    write(other, {"event": "start", **START})
    assert read_run(other).name == "other"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with a log.jsonl"):
        read_run(tmp_path)
    write(tmp_path / "log.jsonl", {"event": "step", **step(1, 1.0)})
    with pytest.raises(ValueError, match="must begin with a record of its start"):
        read_run(tmp_path)
    write(tmp_path / "log.jsonl", {"event": "start", **START}, {"event": "step", "step": 2})
    with pytest.raises(ValueError, match="tell step, loss and iteration_s"):
        read_run(tmp_path)
