"""A recorded step as a file that Perfetto and chrome://tracing open."""

import json
from pathlib import Path

from stronghold.lab.outputs import LOG_NAME, TIMELINE_NAME, write_output
from stronghold.lab.page.reading import find_timeline, read_page_results
from stronghold.lab.records.timeline import read_spans, to_chrome


def write_trace(folder: str | Path, path: str | Path) -> tuple[str, tuple[str, ...]]:
    """Writes the timeline of the run in ``folder``, or of the newest run with one in a folder of results, to ``path``.

    Returns the run's name, and notes on timelines that could not be read. Raises ValueError if there is no timeline,
    and OSError where the trace cannot be written.
    """
    folder = Path(folder)
    notes: tuple[str, ...] = ()
    if (folder / TIMELINE_NAME).is_file():
        name, spans = folder.resolve().name, read_spans(folder / TIMELINE_NAME)
    elif (folder / LOG_NAME).is_file():
        name, spans = folder.name, []
    else:
        run, spans, notes = find_timeline(read_page_results(folder))
        name = run.name if run else ""
    if not spans:
        raise ValueError(
            f"a trace must be of a run that has recorded the timeline of a step (got {str(folder)!r}, without a "
            f"{TIMELINE_NAME} to read); pass the folder of another run"
        )
    trace = json.dumps(to_chrome(spans, f"stronghold: one step of {name}")) + "\n"
    write_output("trace", path, trace)
    return name, notes
