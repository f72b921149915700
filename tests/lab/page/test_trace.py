"""A recorded step as a trace, from a run's folder or from the results that it is in."""

import json

import pytest

from stronghold.lab.page.trace import write_trace
from stronghold.lab.records.timeline import to_chrome, write_spans
from stronghold.spans import Span
from tests.lab.page.examples import write_log

SPANS = [Span("compute", "forward 0", 0.0, 0.25), Span("fetches", "fetch 1", 0.1, 0.2)]


@pytest.mark.parametrize("of_results", [True, False])
def test_the_trace_is_that_of_the_run_or_of_the_newest_with_one(tmp_path, of_results):
    folder = write_log(tmp_path / "results", "a")
    write_spans(folder / "timeline.json", SPANS)
    write_log(tmp_path / "results", "b", time="2026-11-22T00:00:00+00:00")
    path = tmp_path / "deep" / "trace.json"
    assert write_trace(tmp_path / "results" if of_results else folder, path) == ("a", ())
    assert json.loads(path.read_text()) == to_chrome(SPANS, "stronghold: one step of a")


def test_a_damaged_timeline_is_passed_over_in_results_and_an_error_in_its_run(tmp_path):
    write_spans(write_log(tmp_path, "a") / "timeline.json", SPANS)
    damaged = write_log(tmp_path, "b", time="2026-11-22T00:00:00+00:00")
    (damaged / "timeline.json").write_text('[["compute", "x", 2, 1]]')
    name, notes = write_trace(tmp_path, tmp_path / "trace.json")
    assert name == "a"
    assert "ends before it begins" in notes[0]
    with pytest.raises(ValueError, match=r"ends before it begins.*timeline\.json"):
        write_trace(damaged, tmp_path / "trace.json")


def test_without_a_timeline_there_is_no_trace(tmp_path):
    folder = write_log(tmp_path, "a")
    for path in (tmp_path, folder):
        with pytest.raises(ValueError, match=r"a trace must be of a run that has recorded the timeline of a step"):
            write_trace(path, tmp_path / "trace.json")
    with pytest.raises(ValueError, match="results must be a folder that exists"):
        write_trace(tmp_path / "absent", tmp_path / "trace.json")


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    write_spans(write_log(tmp_path, "a") / "timeline.json", SPANS)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the trace.*file/trace.json"):
        write_trace(tmp_path, tmp_path / "file" / "trace.json")
