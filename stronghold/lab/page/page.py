"""One self-contained page of sections: nothing is loaded, and no script runs but its own."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from stronghold.lab.outputs import write_output
from stronghold.lab.page.curves import loss_section, memory_section
from stronghold.lab.page.reading import find_timeline, read_page_results
from stronghold.lab.page.runs import machines_section, missing_notes, runs_section
from stronghold.lab.page.section import Figure, Section, figures_section
from stronghold.lab.page.step import timeline_section


def write_page(
    folder: str | Path,
    path: str | Path,
    *,
    run: str | None = None,
    figures: Sequence[Figure] = (),
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Writes the page of the results in ``folder`` to ``path``; returns ``notes`` and those on what it leaves out.

    The timeline is that of the run called ``run``, by default of the newest that has one. Raises ValueError if there
    is no run, or none called so, and OSError where the page cannot be written.
    """
    results = read_page_results(folder)
    timed, spans, timeline_notes = find_timeline(results, run)
    loss, loss_notes = loss_section(results.runs)
    memory, memory_notes = memory_section(results.runs)
    timeline, span_notes = timeline_section(timed, spans)
    sections = [machines_section(results.runs), runs_section(results.runs)]
    if figures:
        sections.append(figures_section("Figures", figures))
    sections += [loss, memory, timeline]
    found = (*results.notes, *missing_notes(results.runs), *loss_notes, *memory_notes, *timeline_notes, *span_notes)
    notes = tuple(dict.fromkeys((*found, *notes)))
    sections.append(_notes_section(notes))
    about = f"runs: {len(results.runs)}, from {folder}, read {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    if notes:
        about += f"; notes on what is left out, at the end: {len(notes)}"
    # A folder's name may have bytes that are no text.
    page = to_html("stronghold: results", about, sections).encode("utf-8", "replace")
    write_output("page", path, page)
    return notes


def to_html(title: str, about: str, sections: Sequence[Section]) -> str:
    """Returns the page as HTML, with its style and its script in it."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "timeline.js"))
    # Beside the escaping: the browser runs the script with this hash, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections)
    parts = "".join(
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>{section.body}</section>\n'
        for section in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p>{escape(about)}</p><nav>{links}</nav></header>
<main>
{parts}</main>
<script>{script}</script>
</body>
</html>
"""


def _notes_section(notes: Sequence[str]) -> Section:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return Section(title="Left out", body=f"<ul>{items}</ul>" if notes else "<p>Nothing was left out.</p>")
