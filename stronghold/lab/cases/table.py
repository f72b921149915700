"""A case's table, to read and as CSV."""

import csv
import io
import math
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from stronghold.lab.cases.case import Case
from stronghold.lab.cases.points import Panel, Point, Shown
from stronghold.lab.cases.published import PUBLISHED
from stronghold.lab.cases.series import SERIES
from stronghold.units import format_bytes, format_count

COLUMNS = (
    "case", "origin", "machine", "preset", "group", "method", "layers", "window", "parameters", "quantity", "value",
    "low", "high", "steps", "first_loss", "last_loss", "device_bytes", "host_bytes", "wrong", "commit", "time",
    "source",
)  # fmt: skip


def csv_text(shown: Shown) -> str:
    """Returns a line for each point, after one with the names of COLUMNS; numbers are not rounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for panel in shown.panels:
        writer.writerows(_row(shown, panel, point) for point in panel.points)
    return text.getvalue()


def tables(shown: Shown) -> list[Group]:
    """Returns a table for each panel, below its title: what was measured, and what was published."""
    return [_table(shown, panel) for panel in shown.panels]


def format_value(case: Case, value: float) -> str:
    """Returns a value of a case's y axis with as many digits as say something; its unit is in the axis' name."""
    if case.largest:
        return format_count(round(value)) if value else "none"
    return f"{value:#.4g}" if value < 1000 else f"{value:,.0f}"


def _row(shown: Shown, panel: Panel, point: Point) -> dict[str, Any]:
    item, run = point.measurement, point.wanted
    row: dict[str, Any] = {
        "case": shown.case.number,
        "origin": "published" if panel.published else "measured",
        "machine": panel.machine,
        "preset": "v100" if panel.published else shown.preset.name,
        "group": run.group,
        "method": run.method,
        "layers": run.layers,
        "window": run.window,
        "parameters": point.parameters or None,
        "quantity": shown.case.y,
        "value": point.y,
        "low": point.low,
        "high": point.high,
    }
    if item is None:
        return row
    names = ("steps", "device_bytes", "host_bytes", "wrong", "commit", "time", "source")
    losses = {"first_loss": item.losses[0], "last_loss": item.losses[-1]} if item.losses else {}
    return {**row, **losses, **{name: getattr(item, name) for name in names}}


def _table(shown: Shown, panel: Panel) -> Group:
    case = shown.case
    which = "what the artifact measured" if panel.published else f"measured, --machine {shown.preset.name}"
    title = f"Case {case.number}, {case.figure}: {case.title.lower()}; {which}\n{panel.machine}"
    drawn = Table()
    names = [
        "method",
        "layers",
        "window",
        "parameters",
        case.y_label,
        "spread",
        "loss",
        "device",
        "host",
        "artifact",
    ]
    if case.x == "baseline":
        names.insert(0, "largest of")
    rows = [_cells(case, point) for point in panel.points]
    # The artifact's numbers stand beside runs of its own models alone.
    beside = not panel.published and shown.preset.name == "v100"
    hidden = {case.y_label if case.largest else "", "" if beside else "artifact"}
    names = [name for name in names if name not in hidden and any(row[name] for row in rows)]
    for name in names:
        drawn.add_column(name, justify="left" if name in ("method", "largest of") else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(row[name] for name in names))
    return Group(Text(title), drawn)


def _cells(case: Case, point: Point) -> dict[str, str]:
    item, run = point.measurement, point.wanted
    spread = f"{format_value(case, point.low)} to {format_value(case, point.high)}" if point.low != point.high else ""
    beside = _published_beside(case, point)
    return {
        "largest of": SERIES[run.group].label if run.group else "",
        "method": SERIES[run.method].label,
        "layers": str(run.layers) if run.layers else "none",
        "window": "" if run.window is None else str(run.window),
        "parameters": format_count(point.parameters) if point.parameters and run.layers else "",
        case.y_label: format_value(case, point.y),
        "spread": spread,
        "loss": _losses(item.losses if item else ()) + (" WRONG" if point.wrong else ""),
        "device": format_bytes(item.device_bytes) if item and item.device_bytes else "",
        "host": format_bytes(item.host_bytes) if item and item.host_bytes else "",
        "artifact": "" if beside is None else format_value(case, beside),
    }


def _losses(losses: tuple[float, ...]) -> str:
    ends = (losses[0], losses[-1]) if len(losses) > 1 else losses
    return " to ".join("nan" if math.isnan(loss) else f"{loss:.3f}" for loss in ends)


def _published_beside(case: Case, point: Point) -> float | None:
    """Returns the artifact's number for the same place in the figure: the same method, and number on the x axis."""

    def place(run: Any) -> Any:
        return (run.method, getattr(run, case.x)) if case.varies else (run.method, run.group)

    return next((y for run, y in PUBLISHED[case.number].items() if place(run) == place(point.wanted)), None)
