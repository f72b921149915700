"""Results of every format are read, and what is left out is named with the reason."""

import json

import pytest

from stronghold.lab.cases.reading import read_results
from tests.lab.cases.conftest import artifact_log, make_record, make_trial


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_folder_is_read_with_all_that_it_has(tmp_path):
    write(tmp_path / "runs.jsonl", make_record(), make_record("l2l"))
    write(tmp_path / "trials.jsonl", make_trial())
    (tmp_path / "log_a.txt").write_text(artifact_log())
    (tmp_path / "log_ours.txt").write_text("settings  method             stronghold\n")  # its record is there
    (tmp_path / "log_all.txt").write_text("methods       \n             \n  method   samples/s\n")  # theirs are there
    write(tmp_path / "adamw.jsonl", {"benchmark": "adamw"})  # another program's
    found = read_results([tmp_path])
    assert [item.method for item in found.measurements] == ["stronghold", "l2l", "stronghold", "stronghold"]
    assert [item.artifact for item in found.measurements] == [False, False, False, True]
    assert found.measurements[1].source == f"{tmp_path}/runs.jsonl, record 2"
    assert found.notes == ()


def test_what_is_left_out_is_said(tmp_path):
    runs = write(tmp_path / "runs.jsonl", make_record(), {"old": 1}, make_record("gemini"))
    runs.write_text(runs.read_text() + '{"settings": {"meth')
    (tmp_path / "log_cut.txt").write_text(artifact_log()[:700])
    (tmp_path / "log_garbage.txt").write_bytes(b"\x00\xff\xfe")
    found = read_results([tmp_path])
    assert len(found.measurements) == 1
    assert [note.removeprefix(f"{tmp_path}/").split(" (got")[0] for note in found.notes] == [
        "runs.jsonl:4 was cut off and is left out",
        "runs.jsonl, record 2 is left out: it has no settings and no summary: a record of another or an older format",
        "runs.jsonl, record 3 is left out: a method must be one of megatron-lm, megatron-lm-exact, l2l, "
        "zero-offload, zero-infinity, zero-infinity-nvme, fsdp-offload, torchao-offload, stronghold",
        "log_cut.txt is left out: it was cut short before its first ten iterations, or has another format",
        "log_garbage.txt is left out: it is no log of a run, or was cut short before it said anything",
    ]


def test_a_line_in_the_middle_that_is_no_record_leaves_the_file_out(tmp_path):
    runs = write(tmp_path / "runs.jsonl", make_record())
    runs.write_text("nonsense\n" + runs.read_text())
    found = read_results([runs])
    assert found.measurements == ()
    assert "each line of a record file must be a JSON object" in found.notes[0]


def log_of_steps(folder, steps):
    start = make_record()
    del start["summary"]
    start["settings"]["steps"] = 4
    times = {"loss": 6.0, "device_bytes": 5, "peak_device_bytes": 7, "peak_host_bytes": 9}
    lines = [{"step": at, "iteration_s": float(at), **times} for at in range(1, steps + 1)]
    return write(folder / "log.jsonl", {"event": "start", **start}, *({"event": "step", **line} for line in lines))


def test_a_runs_own_log_counts_as_far_as_it_came(tmp_path):
    log_of_steps(tmp_path / "cut", 3)
    log_of_steps(tmp_path / "whole", 4)
    cut, whole = read_results([tmp_path / "cut", tmp_path / "whole" / "log.jsonl"]).measurements
    assert (cut.steps, cut.note, cut.iteration_s, cut.device_bytes) == (3, "interrupted", 2.5, 7)
    assert (whole.steps, whole.note) == (4, "")
    log_of_steps(tmp_path / "empty", 0)
    assert "cut short before its first step" in read_results([tmp_path / "empty"]).notes[0]


def test_a_run_that_went_on_elsewhere_says_so(tmp_path):
    log = log_of_steps(tmp_path / "moved", 4)
    elsewhere = make_record(machine={"host": {"processor": "Other CPU", "cores": 4}})
    with log.open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 2, **elsewhere}) + "\n")
    (moved,) = read_results([tmp_path / "moved"]).measurements
    assert moved.note == "went on after step 2 on another machine: Other CPU, 4 cores"


def test_a_log_for_people_is_named_and_left_out(tmp_path):
    (tmp_path / "log.txt").write_text("settings  method             stronghold\nstep 1 loss 3\n")
    assert "it is a log for people" in read_results([tmp_path / "log.txt"]).notes[0]


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"results must be a folder or a file that exists \(got .*nowhere'\)"):
        read_results([tmp_path / "nowhere"])


def test_what_a_comparison_of_the_records_says_is_wrong(tmp_path):
    write(tmp_path / "runs.jsonl", make_record(losses=[6.5]), {"old": 1}, make_record("l2l", losses=[7.0]))
    (tmp_path / "log_a.txt").write_text(artifact_log())
    seen = []

    def compare(records):
        seen.extend(records)
        return [None, "its loss is 7, and not 6.5"]

    found = read_results([tmp_path], compare)
    assert [record["losses"] for record in seen] == [[6.5], [7.0]]
    assert [item.wrong for item in found.measurements] == ["", "its loss is 7, and not 6.5", ""]


def test_a_run_that_failed_says_so(tmp_path):
    record = make_record(error="refused: DeepSpeed is not installed", losses=[])
    del record["summary"]
    found = read_results([write(tmp_path / "runs.jsonl", record)])
    assert found.notes == (
        f"{tmp_path}/runs.jsonl, record 1 is left out: its run did not succeed: refused: DeepSpeed is not installed",
    )
