"""Timelines as files and as traces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.lab.records.timeline import LANES, read_spans, rows, to_chrome, write_spans
from stronghold.spans import Span

SPANS = [
    Span("updates", "update 1", 0.5, 0.75),
    Span("compute", "forward 0", 0.0, 0.25),
    Span("disk reads", "read 1", 0.1, 0.4),
    Span("disk reads", "read 2", 0.3, 0.5),
    Span("disk reads", "read 3", 0.4, 0.6),
    Span("else", "?", 0.0, 1.0),
]


def test_spans_come_back_from_a_file(tmp_path):
    write_spans(tmp_path / "timeline.json", SPANS)
    assert read_spans(tmp_path / "timeline.json") == SPANS


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"a": 1}', "[[1, 2]]", '[["a", "b", "x", 1]]', "3", '[["a", "b", 2, 1]]', '[["a", "b", 0, NaN]]'],
)
def test_what_is_no_timeline_is_refused(tmp_path, content):
    path = tmp_path / "timeline.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"a timeline must be .*timeline\.json"):
        read_spans(path)


def test_an_absent_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_spans(tmp_path / "absent.json")


def test_what_overlaps_is_in_rows_of_its_own():
    found = rows(SPANS)
    assert [lane for lane, _ in found] == ["compute", "updates", "disk reads", "disk reads", "else"]
    assert [span.name for span in found[2][1]] == ["read 1", "read 3"]
    assert [span.name for span in found[3][1]] == ["read 2"]


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 30), st.integers(0, 10)), max_size=30))
def test_rows_hold_every_span_once_and_nothing_overlaps_in_one(cases):
    spans = [Span(lane, str(n), begin, begin + length) for n, (lane, begin, length) in enumerate(cases)]
    found = rows(spans)
    assert sorted(span.name for _, row in found for span in row) == sorted(span.name for span in spans)
    for lane, row in found:
        assert all(span.lane == lane for span in row)
        assert all(one.end_s <= other.begin_s for one, other in pairwise(row))


def test_a_trace_has_the_times_in_microseconds_and_a_named_thread_for_each_row():
    trace = json.loads(json.dumps(to_chrome(SPANS, "a run")))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "updates", 2: "disk reads", 3: "disk reads", 4: "else"}
    parts = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len(parts) == len(SPANS)
    assert (parts["update 1"]["ts"], parts["update 1"]["dur"], parts["update 1"]["tid"]) == (500_000, 250_000, 1)
    assert trace["traceEvents"][0]["args"]["name"] == "a run"
