"""What is read of a folder of results, and what is said of the rest."""

import pytest

from stronghold.lab.page.reading import find_timeline, read_page_results
from stronghold.lab.records.timeline import write_spans
from stronghold.spans import Span
from tests.lab.page.examples import ARM, EPYC, record, start, write_lines, write_log

SPANS = [Span("compute", "forward 0", 0.0, 0.25)]
LATER = "2026-11-21T12:00:00+00:00"


def test_a_run_s_log_counts_before_its_line_and_a_line_alone_counts_too(tmp_path):
    write_log(tmp_path, "a", steps=5)
    write_lines(tmp_path / "runs.jsonl", [record("a"), record("b", time=LATER)])
    found = read_page_results(tmp_path)
    assert [(run.name, len(run.steps), run.summary["steps"]) for run in found.runs] == [("a", 5, 5), ("b", 0, 3)]
    assert found.notes == (f"no curves of b: there is no log.jsonl of theirs in {tmp_path}",)


@pytest.mark.parametrize("place", [".", "a", "runs/a"])
def test_logs_are_found_in_the_folder_in_a_folder_in_it_and_in_its_runs(tmp_path, place):
    folder = write_log(tmp_path / "elsewhere", "x")
    target = tmp_path / "results" / place
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)
    assert [len(run.steps) for run in read_page_results(tmp_path / "results").runs] == [3]


def test_what_a_run_s_other_processes_log_is_no_run_of_its_own(tmp_path):
    run = write_log(tmp_path, "x")
    write_log(tmp_path, "other").rename(run / "process-1")
    write_log(tmp_path, "process-2")  # a run that somebody has named so
    found = [(one.name, len(one.steps)) for one in read_page_results(run.parent).runs]
    assert found == [("process-2", 3), ("x", 3)]


def test_what_is_cut_damaged_or_older_is_left_out_and_said(tmp_path):
    path = write_lines(
        tmp_path / "runs.jsonl",
        [record("a"), "{broken\n", {"settings": {"method": "x"}}, [1], record("a"), '{"settings": {"meth'],
    )
    write_log(tmp_path, "older").joinpath("log.jsonl").write_text('{"event": "step", "step": 1}\n')
    (tmp_path / "runs" / "empty").mkdir()
    write_lines(tmp_path / "runs" / "empty" / "log.jsonl", [{"event": "start", **start("empty")}])
    found = read_page_results(tmp_path)
    assert [run.name for run in found.runs] == ["a"]
    said = "\n".join(found.notes)
    for part in (
        f"{path}:2 is no JSON object",
        f"{path}:4 is no JSON object (a list)",
        f"{path}:6 was cut off",
        f"{path}, record 2 is left out: it has no summary",
        f"a is in {path} more than once",
        f"{tmp_path}/runs/empty is left out: it has no step",
        f"{tmp_path}/runs/older is left out",
    ):
        assert part in said, part
    assert len(found.notes) == 8


def test_a_run_without_an_end_is_summed_up_from_its_steps(tmp_path):
    folder = write_log(tmp_path, "killed", end=False, losses=[5.0, 4.0, 2.0])
    (folder / "log.jsonl").open("a").write('{"event": "step", "st')
    (run,) = (found := read_page_results(tmp_path)).runs
    assert run.ended == "no end recorded"
    assert (run.summary["first_loss"], run.summary["last_loss"], run.summary["tokens_per_s"]) == (5.0, 2.0, 128.0)
    assert f"{folder}/log.jsonl:5 was cut off and is left out" in found.notes
    assert "killed has no end recorded: it was killed, or still goes on after step 3" in found.notes


def test_one_name_on_two_machines_is_two_runs(tmp_path):
    gpu = {"name": "H200", "memory_bytes": 139 * 1024**3}
    lines = [record("a", host=EPYC), record("a", host=ARM), record("a", host=ARM, gpus=[gpu])]
    lines[-1]["settings"]["device"] = "cuda"
    write_lines(tmp_path / "runs.jsonl", [*lines, {**record("old"), "machine": None}])
    assert sorted(run.hardware for run in read_page_results(tmp_path).runs) == [
        "Arm, 8 cores, 16.0 GiB",
        "EPYC, 2 cores, 24.0 GiB",
        "H200 139 GiB, Arm, 8 cores, 16.0 GiB",
        "machine not recorded",
    ]


def test_a_run_that_went_on_elsewhere_is_noted(tmp_path):
    resumes = [{"event": "resume", "step": 2, **start("a", host=host)} for host in (EPYC, ARM)]
    write_log(tmp_path, "a", more=resumes)
    assert read_page_results(tmp_path).notes == ("a went on after step 2 on another machine: Arm, 8 cores, 16.0 GiB",)


def test_no_results_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"results must be a folder that exists \(got '.*absent'\)"):
        read_page_results(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"got none in .*; pass the folder of your runs"):
        read_page_results(tmp_path)
    write_lines(tmp_path / "runs.jsonl", ["{"])
    with pytest.raises(ValueError, match=r"got none in .*: .*runs.jsonl:1 was cut off"):
        read_page_results(tmp_path)


def test_the_newest_run_with_a_timeline_that_can_be_read_is_taken(tmp_path):
    for hour, name in enumerate(("old", "new", "newer", "newest")):
        write_log(tmp_path, name, time=f"2026-11-21T1{hour}:00:00+00:00")
    for name in ("old", "new", "newer"):
        write_spans(tmp_path / "runs" / name / "timeline.json", SPANS)
    (tmp_path / "runs" / "newer" / "timeline.json").write_text('[["a"')
    results = read_page_results(tmp_path)
    run, spans, notes = find_timeline(results)
    assert (run.name, spans) == ("new", SPANS)
    assert len(notes) == 1 and notes[0].startswith("newer: a timeline must be")
    assert find_timeline(results, "old")[0].name == "old"
    run, spans, notes = find_timeline(results, "newest")
    assert (run.name, spans) == ("newest", [])
    assert notes == ("no timeline recorded: there is none to read in the folder of newest (timeline.json)",)
    with pytest.raises(ValueError, match=r"got --run 'x', the results have old, new, newer, newest"):
        find_timeline(results, "x")


def test_without_any_timeline_there_is_a_note(tmp_path):
    write_log(tmp_path, "a")
    run, spans, notes = find_timeline(read_page_results(tmp_path))
    assert (run, spans) == (None, [])
    assert notes == ("no timeline recorded: there is none to read in any run's folder (timeline.json)",)


def comparison(name, losses, **other):
    """Returns the lines in runs.jsonl of a comparison's resident run and of stronghold's."""
    lines = []
    for method, own in (("megatron-lm", [4.0, 3.0]), ("stronghold", losses)):
        line = {**record(f"{name}/{method}"), "losses": own}
        line["settings"] |= {"method": method, **other}
        lines.append(line)
    return lines


def test_methods_of_two_comparisons_are_all_there(tmp_path):
    lines = [*comparison("all_1", [4.0, 3.0]), *comparison("all_2", [4.0, 3.0], dtype="bf16")]
    write_lines(tmp_path / "runs.jsonl", lines)
    folder = write_log(tmp_path, "all_2/stronghold", steps=2)
    found = read_page_results(tmp_path)
    assert {run.name: run.folder for run in found.runs} == {
        "all_1/megatron-lm": None,
        "all_1/stronghold": None,
        "all_2/megatron-lm": None,
        "all_2/stronghold": folder,
    }
    assert not any("more than once" in note for note in found.notes)


def test_losses_that_leave_the_resident_run_s_are_wrong(tmp_path):
    write_lines(tmp_path / "runs.jsonl", [*comparison("all_1", [4.0, 3.1]), {**record("odd"), "losses": "4.0"}])
    found = read_page_results(tmp_path)
    wrong = "loss 3.1000 in step 2, megatron-lm has 3.0000 (0.033 away, tolerance 1e-04)"
    assert {run.name: run.wrong for run in found.runs if run.wrong} == {"all_1/stronghold": wrong}
    assert f"all_1/stronghold is WRONG: {wrong}" in found.notes


def test_a_method_that_failed_is_a_run_that_says_so(tmp_path):
    error = {"error": "refused: it runs on CUDA alone", "losses": []}
    lines = [{**start(f"all_1/{method}"), **error} for method in ("l2l", "stronghold")]
    for line, method in zip(lines, ("l2l", "stronghold"), strict=True):
        line["settings"] |= {"method": method}
    write_lines(tmp_path / "runs.jsonl", lines)
    write_log(tmp_path, "all_1/stronghold", steps=2, end=False)
    found = read_page_results(tmp_path)
    assert [(run.name, run.ended, len(run.steps)) for run in found.runs] == [
        ("all_1/l2l", "refused", 0),
        ("all_1/stronghold", "refused", 2),
    ]
    assert found.notes == (
        "all_1/l2l refused: it runs on CUDA alone",
        "all_1/stronghold refused: it runs on CUDA alone",
    )
