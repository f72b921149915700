"""A plan as one page: its table, and the timeline of the step that it expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from stronghold.lab.outputs import write_output
from stronghold.lab.page.page import to_html
from stronghold.lab.page.section import Section, table
from stronghold.lab.page.step import drawn_section
from stronghold.spans import Span

_LANES = {"host": "launches", "reads": "disk reads"}
"""What recorded timelines call the planner's resources, where that is another name."""
_TITLE = "stronghold: a plan"


def write_plan_page(
    path: str | Path,
    *,
    model: str,
    machine: str,
    rows: Iterable[Sequence[str]],
    spans: Iterable[Span],
    step_s: float,
    accumulate: int = 1,
) -> tuple[str, ...]:
    """Writes the page of a plan to ``path``; returns notes on what it leaves out. Raises OSError.

    ``rows`` are the lines of its table and ``spans`` what is under way in its step, of ``step_s`` seconds; what the
    step before has left to do, or the next one does, is cut off. Without any the table is all. Of a step that
    accumulates many batches ``spans`` are of the first and the last one.
    """
    cells = ([escape(cell) for cell in row] for row in rows)
    sections = [Section(title="Plan", body=table(["", "", ""], cells))]
    notes = ["the plan has no timeline: the page has its table"]
    if drawn := list(_within(spans, step_s)):
        text = f"One step of <b>{escape(model)}</b> as it is planned"
        if accumulate > 2:
            text += f", but for {accumulate - 2} of its {accumulate} batches: they take as long as the last one does"
        step, notes = drawn_section("One planned step", text, drawn)
        sections.append(step)
    page = to_html(_TITLE, f"for {machine}", sections).encode("utf-8", "replace")
    write_output("page", path, page)
    return tuple(notes)


def is_plan_page(path: str | Path) -> bool:
    """Whether the file at ``path`` is a page that :func:`write_plan_page` wrote. Raises OSError for one not to read."""
    with open(path, "rb") as file:
        return f"<title>{_TITLE}</title>".encode() in file.read(4096)


def _within(spans: Iterable[Span], step_s: float) -> Iterable[Span]:
    """Yields the parts of ``spans`` that are in the step, in the lanes of recorded timelines."""
    for span in spans:
        begin_s, end_s = max(0.0, span.begin_s), min(span.end_s, step_s)
        if begin_s < end_s:
            lane = _LANES.get(span.lane, span.lane)
            if lane == "disk":
                lane = "disk writes" if span.name.startswith("write") else "disk reads"
            yield Span(lane, span.name, begin_s, end_s)
