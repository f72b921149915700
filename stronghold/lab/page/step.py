"""The timeline of one step: what the page's script draws, and in numbers how busy each lane was."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from stronghold.lab.page.reading import RecordedRun
from stronghold.lab.page.section import Section, swatch, table
from stronghold.lab.records.timeline import LANES, rows
from stronghold.spans import Span
from stronghold.units import format_seconds

_COLOURS = dict(
    zip(LANES, ("#0072B2", "#8A8A8A", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#A6761D"), strict=True)
)
_OTHER = "#7B6FB0"
_MOST_SPANS = 20_000
"""Of a page: some 700 kB."""


def timeline_section(run: RecordedRun | None, spans: Sequence[Span]) -> tuple[Section, list[str]]:
    """Returns the section with ``run``'s timeline, or with the word that none was recorded, and notes."""
    if run is None or not spans:
        of = f" of {escape(run.name)}" if run else ""
        return Section(title="One step", body=f"<p>No timeline{of} was recorded.</p>"), []
    settings = run.settings
    what = ", ".join(
        f"{name} {settings[name]}" for name in ("method", "window", "store", "device", "dtype") if name in settings
    )
    return drawn_section("One step", f"One step of <b>{escape(run.name)}</b> ({escape(what)})", spans)


def drawn_section(title: str, of: str, spans: Sequence[Span]) -> tuple[Section, list[str]]:
    """Returns the section with a timeline of ``spans``, one or more, and notes; ``of`` says in HTML what they are."""
    shown = sorted(spans, key=lambda span: span.begin_s - span.end_s)[:_MOST_SPANS]
    notes = []
    if len(shown) < len(spans):
        longest_ms = (shown[-1].end_s - shown[-1].begin_s) * 1e3
        notes.append(
            f"{len(spans) - len(shown)} of {len(spans)} parts of the timeline, of {longest_ms:.3g} ms or less, are not "
            "in the page; `stronghold trace` writes them all"
        )
    whole_s = max(span.end_s for span in spans)
    body = _BODY.format(
        of=of,
        whole=format_seconds(whole_s),
        lanes=_lanes(spans, whole_s),
        spans=_to_script(_drawn(shown)),
    )
    return Section(title=title, body=body), notes


_BODY = """\
<p>{of} in {whole}: what each part of the machine is at. What one of them does at the same time is in rows of its
own.</p>
<div class="timeline" id="timeline">
<div class="controls">
<button type="button" data-do="in" aria-label="zoom in">+</button>
<button type="button" data-do="out" aria-label="zoom out">&minus;</button>
<button type="button" data-do="left" aria-label="earlier">&larr;</button>
<button type="button" data-do="right" aria-label="later">&rarr;</button>
<button type="button" data-do="whole">whole step</button>
<output aria-live="polite"></output>
</div>
<div class="stage">
<canvas tabindex="0" role="img" aria-label="timeline of one step, a lane for each part of the machine"></canvas>
<div class="tip" hidden></div>
</div>
<p class="hint">Zoom with the wheel, two fingers, a double click or + and &minus;; move by dragging or with &larr; and
&rarr;; 0 shows the whole step. Point at a part, or tap it, for its times.</p>
<noscript><p>The timeline is drawn by a script, which this browser does not run.</p></noscript>
</div>
{lanes}
<script type="application/json" id="spans">{spans}</script>
"""


def _lanes(spans: Sequence[Span], whole_s: float) -> str:
    """Returns a table of the lanes: their colours, how many parts they have, and how long they were at any."""
    lines = []
    for lane in dict.fromkeys(lane for lane, _ in rows(spans)):
        own = [span for span in spans if span.lane == lane]
        busy_s = busy(own)
        share = f"{busy_s / whole_s:.1%}" if whole_s else "?"
        name = f"{swatch(_COLOURS.get(lane, _OTHER))}{escape(lane)}"
        lines.append([name, f"{busy_s * 1e3:,.3f} ms", share, f"{len(own):,}"])
    return table(["lane", "busy", "share", "parts"], lines)


def busy(spans: Iterable[Span]) -> float:
    """Returns for how many seconds at least one of ``spans`` was under way."""
    total_s = until_s = 0.0
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def _drawn(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns rows for the script: lane, colour, and (name, begin, length) of each part, in milliseconds."""
    return [
        {
            "lane": lane,
            "colour": _COLOURS.get(lane, _OTHER),
            "spans": [
                [span.name, round(span.begin_s * 1e3, 6), round((span.end_s - span.begin_s) * 1e3, 6)] for span in row
            ],
        }
        for lane, row in rows(spans)
    ]


def _to_script(value: Any) -> str:
    """Returns JSON that cannot end the script element that it is in, whatever the texts in it are."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
