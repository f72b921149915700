"""The paper's cases as figures of the page."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stronghold.lab.cases.case import CASES
from stronghold.lab.cases.drawing import save_figure
from stronghold.lab.cases.machines import MACHINES
from stronghold.lab.cases.points import Shown, in_words, machines_of, show
from stronghold.lab.cases.reading import read_results
from stronghold.lab.page.section import Figure
from stronghold.lab.records.agreement import disagreements


def case_figures(folder: str | Path) -> tuple[list[Figure], list[str]]:
    """Returns a figure for each case, setting and machine that ``folder`` has runs of, and notes on what has none.

    A folder without any figure has no notes either.
    """
    figures: list[Figure] = []
    notes: list[str] = []
    if not Path(folder).is_dir():
        return figures, notes  # whoever reads the runs says so
    found = read_results([folder], disagreements)
    notes += [f"of the cases' figures, {note}" for note in found.notes]
    for case in CASES.values():
        drawn = len(figures)
        for preset in MACHINES.values():
            for machine in machines_of(case, preset, found.measurements):
                shown = show(case, preset, found.measurements, on=machine)
                if shown.here is not None:
                    figures.append(_figure(shown))
        if len(figures) == drawn:
            notes.append(f"case {case.number} ({case.title}) has no runs: examples/case{case.number}_run.sh makes them")
    return figures, notes if figures else []  # a folder of other runs has nothing to do with the cases


def _figure(shown: Shown) -> Figure:
    assert shown.here is not None
    wrong = [f"{in_words(p.wanted)}: {p.wrong}" for panel in shown.panels for p in panel.points if p.wrong]
    with tempfile.TemporaryDirectory() as scratch:
        svg = save_figure(shown, Path(scratch) / "case")[1].read_text(encoding="utf-8")
    caption = f"Settings {shown.preset.name}, measured on {shown.here.machine}."
    return Figure(
        title=f"{shown.case.title} ({shown.case.figure})",
        svg=svg,
        caption=" ".join([caption, *(f"Wrong losses: {line}." for line in wrong)]),
    )
