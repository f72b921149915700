"""What the records of trace_steps.py come to: one line for each setting, and the gaps of each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table
from trace_settings import Setting

from stronghold.lab.records.json_lines import Record
from stronghold.units import format_bytes, format_count, format_seconds

SHAPE = ("layers", "hidden", "heads", "vocabulary", "sequence", "dtype", "method")
COLUMNS = (
    *(
        "",
        "window",
        "a step",
        "of resident",
        "tokens/s",
        "TFLOP/s",
        "busy",
        "up",
        "down",
        "copies hidden",
        "fetch wait",
    ),
    *("update wait", "device", "of the report", "least peak", ""),
)
REASONS = 5
SHOWN_GAP_S = 1e-5


def name_of(call: Record) -> str:
    """Returns a setting in words."""
    if call["method"] == "plain":
        return f"batch {call['batch']}, plain PyTorch, resident"
    return Setting(**{name: value for name, value in call.items() if name not in SHAPE}).name


def is_wrong(record: Record) -> bool:
    """Tells whether a setting's losses are not plain PyTorch's; a number that is none is never near."""
    return not float(record.get("away", 0.0)) <= record.get("tolerance", 0.0)


def table(records: Sequence[Record], device: str) -> Table:
    """Returns a line for each setting. TFLOP/s counts 8·N a token, for every layer is computed again."""
    call = records[0]["call"]
    of = f"{format_count(records[0]['parameters'])} parameters, "
    seen = "kernels" if any(map(_counted, records)) else "PyTorch's operations"
    title = f"{of}{call['dtype']}, {call['sequence']} tokens per sample, on {device}; busy: by {seen}"
    drawn = Table(title=title, box=box.SIMPLE)
    for column in COLUMNS:
        drawn.add_column(column, justify="right" if column else "left", no_wrap=True)
    for record in records:
        drawn.add_row(*_cells(record))
    return drawn


def _counted(record: Record) -> bool:
    return any(moved["bytes"] for moved in record.get("trace", {}).get("copies", {}).values())


def _cells(record: Record) -> list[str]:
    call = record["call"]
    step_s, trace = median(record["step_s"]), record.get("trace")
    tokens = call["batch"] * call["sequence"]
    cells = {
        "": name_of(call),
        "a step": format_seconds(step_s),
        "tokens/s": f"{tokens / step_s:,.0f}",
        "TFLOP/s": f"{8 * record['parameters'] * tokens / step_s / 1e12:.4g}",
        "busy": f"{trace['busy']:.1%}" if trace else "",
        "copies hidden": f"{trace['hidden']:.1%}" if trace and trace["hidden"] is not None else "",
        "device": format_bytes(held) if (held := record.get("held_bytes") or record.get("peak_bytes")) else "",
    }
    for way, moved in (trace["copies"] if trace else {}).items():
        rate = f"{format_bytes(moved['bytes'])}, {moved['gb_per_s']:.3g} GB/s"
        cells[way] = rate if moved["bytes"] else format_seconds(moved["copying_s"])
    if "of_ordinary" in record:
        placed = record["placement"]
        cells["window"] = f"{placed['window']}" + (f", {placed['resident']} resident" if placed["resident"] else "")
        if plan := record.get("planned"):
            cells["window"] = f"{plan['chosen']}; {format_seconds(plan['step_s'])} planned"
        elif call["cap"] is not None:  # chosen to fit it: not what the setting's name says
            cells["window"] += f", {placed['micro_batch']} at a time" if placed["micro_batch"] else ""
            cells["window"] += ", inputs on the host" if placed["activations"] == "host" else ""
        cells["of resident"] = f"{median(record['of_ordinary']):.3f}"
        cells["fetch wait"] = format_seconds(record["waits_s"]["fetch"])
        cells["update wait"] = format_seconds(record["waits_s"]["update"])
        if record["held_bytes"]:
            cells["of the report"] = f"{record['held_bytes'] / record['report_bytes']:.3f}"
        if record["least_peak_bytes"]:
            cells["least peak"] = f"{record['least_peak_bytes'] / record['least_peak_said']:.3f}"
    return [*(cells.get(column, "") for column in COLUMNS[:-1]), "WRONG" if is_wrong(record) else ""]


def why_idle(record: Record) -> str:
    """Returns in a line how long a setting's computation stood still in the traced step, and why."""
    trace: dict[str, Any] = record["trace"]
    whys = [f"{why} {format_seconds(s)}" for why, s in list(trace["why_s"].items())[:REASONS]]
    slower = trace["traced_s"] / median(record["step_s"])
    idle = f"{format_seconds(sum(trace['why_s'].values()))} of {format_seconds(trace['traced_s'])} idle"
    return f"{name_of(record['call'])}: {idle} (traced {slower:.2f} x as long): {'; '.join(whys)}"


def gap_table(record: Record) -> Table:
    """Returns the largest gaps of a setting's computation."""
    trace: dict[str, Any] = record["trace"]
    title = f"largest gaps, {name_of(record['call'])}"
    drawn = Table(title=title, box=box.SIMPLE)
    for column in ("at", "gap", "before", "after", "why"):
        drawn.add_column(column, justify="right" if column in ("at", "gap") else "left", no_wrap=True)
    for gap in trace["gaps"]:
        if gap["length_s"] >= SHOWN_GAP_S:
            times = (format_seconds(gap["at_s"]), format_seconds(gap["length_s"]))
            drawn.add_row(*times, gap["before"], gap["after"], gap["why"])
    return drawn
