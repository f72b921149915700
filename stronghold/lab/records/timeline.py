"""A step's timeline as a file, and as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stronghold.spans import Span

LANES = ("compute", "waits", "fetches", "gradients", "updates", "root", "disk reads", "disk writes")
"""In the order in which they are drawn; others follow."""


def write_spans(path: str | Path, spans: Iterable[Span]) -> None:
    """Writes spans as one JSON array of [lane, name, begin_s, end_s]. Raises OSError where that fails."""
    Path(path).write_text(json.dumps([list(span) for span in spans]) + "\n", encoding="utf-8")


def read_spans(path: str | Path) -> list[Span]:
    """Reads what :func:`write_spans` wrote. Raises ValueError, with the file's name, for anything else."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        spans = [Span(str(lane), str(name), float(begin_s), float(end_s)) for lane, name, begin_s, end_s in found]
        if wrong := [span for span in spans if not 0 <= span.begin_s <= span.end_s < math.inf]:
            raise ValueError(f"{wrong[0]} ends before it begins, or is in no time")
        return spans
    except OSError as error:
        raise ValueError(
            f"a timeline must be readable (got {error.strerror} for {str(path)!r}); pass the folder of a run that has "
            "recorded one"
        ) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"a timeline must be a JSON array of [lane, name, begin_s, end_s] ({error} in {str(path)!r}); record it "
            "anew"
        ) from error


def rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Returns spans by lane, in the lanes' order; what overlaps within a lane is in further rows of the same lane."""
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (_place(lane), len(lane), lane))  # 10 behind 9
    found: list[tuple[str, list[Span]]] = []
    for lane in lanes:
        own: list[list[Span]] = []
        for span in sorted((s for s in spans if s.lane == lane), key=lambda s: (s.begin_s, s.end_s)):
            free = next((row for row in own if row[-1].end_s <= span.begin_s), None)
            if free is None:
                own.append([span])
            else:
                free.append(span)
        found += [(lane, row) for row in own]
    return found


def to_chrome(spans: Sequence[Span], title: str) -> dict[str, Any]:
    """Returns spans in the Trace Event Format, times in microseconds, one thread for each row.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}]
    for number, (lane, row) in enumerate(rows(spans)):
        place = {"pid": 1, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": lane,
                **place,
                "ts": span.begin_s * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
            }
            for span in row
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _place(lane: str) -> int:
    return LANES.index(lane) if lane in LANES else len(LANES)
