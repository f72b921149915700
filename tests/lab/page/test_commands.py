"""`stronghold report` and `stronghold trace`: what they write, print and refuse."""

import json

import pytest

from stronghold.lab import cli
from stronghold.lab.records.timeline import write_spans
from stronghold.spans import Span
from tests.lab.page.examples import record, write_lines, write_log


def test_report_and_trace(capsys, tmp_path):
    folder = write_log(tmp_path, "a")
    write_spans(folder / "timeline.json", [Span("compute", "forward 0", 0.0, 0.25)])
    write_lines(tmp_path / "runs.jsonl", [record("b"), "{"])
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert cli.main(["report", str(tmp_path), "-o", str(page), "--run", "a"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{page}\n"
    assert f"stronghold: note: {tmp_path}/runs.jsonl:2 was cut off and is left out\n" in said.err
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["trace", str(folder), "-o", str(trace)]) == 0
    assert capsys.readouterr().out == f"{trace}: a step of a\n"
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["report", "absent"], "results must be a folder that exists"),
        (["report", "."], "got none in '.'"),
        (["trace", "."], "got none in '.'"),
    ],
)
def test_a_report_and_a_trace_of_nothing_are_refused(capsys, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == cli.WRONG_USAGE
    error = capsys.readouterr().err
    assert error.startswith("stronghold: error: ") and reason in error and error.count("\n") == 1


def test_a_page_that_cannot_be_written_is_a_failure(capsys, tmp_path):
    write_log(tmp_path, "a")
    assert cli.main(["report", str(tmp_path), "-o", "/dev/full"]) == cli.FAILED
    assert "cannot write the page (No space left on device): /dev/full; free space there" in capsys.readouterr().err
