"""The paper's cases as figures of the page."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stronghold.evaluation.agreement import disagreements
from stronghold.evaluation.cases.case import CASES
from stronghold.evaluation.cases.drawing import save_figure
from stronghold.evaluation.cases.machines import MACHINES
from stronghold.evaluation.cases.points import in_words, show
from stronghold.evaluation.cases.reading import read_results
from stronghold.evaluation.page.section import Figure


def case_figures(folder: str | Path) -> tuple[list[Figure], list[str]]:
    """Returns a figure for each case and setting of which ``folder`` has runs, and notes on what is left out."""
    figures: list[Figure] = []
    notes: list[str] = []
    if not Path(folder).is_dir():
        return figures, notes  # whoever reads the runs says so
    found = read_results([folder], disagreements)
    for case in CASES.values():
        drawn = len(figures)
        for preset in MACHINES.values():
            try:
                shown = show(case, preset, found.measurements)
            except ValueError as error:  # runs of several machines
                notes.append(f"case {case.number}, settings {preset.name}: {error}")
                continue
            if shown.here is None:
                continue
            wrong = [f"{in_words(p.wanted)}: {p.wrong}" for panel in shown.panels for p in panel.points if p.wrong]
            with tempfile.TemporaryDirectory() as scratch:
                svg = save_figure(shown, Path(scratch) / "case")[1].read_text(encoding="utf-8")
            caption = " ".join([f"Settings {preset.name}.", *(f"Wrong losses: {line}." for line in wrong)])
            figures.append(Figure(title=f"{case.title} ({case.figure})", svg=svg, caption=caption))
        if len(figures) == drawn:
            notes.append(f"case {case.number} ({case.title}) has no runs: examples/case{case.number}_run.sh makes them")
    return figures, notes
