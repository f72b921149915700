"""What the records of benchmarks/gpu/compare.py come to: rows with medians and ratios, the goals, and the table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from calls import spread
from compare_parts import DEEPSPEED, FITTED, GOALS, STRONGHOLD
from rich import box
from rich.table import Table

from stronghold.lab.records.agreement import REFERENCE, compared, disagreements
from stronghold.lab.records.json_lines import Record
from stronghold.lab.records.runs import WARM_UP_STEPS
from stronghold.units import format_bytes, format_count, format_seconds, parse_bytes

OF_RESIDENT, RESIDENT_CAP, RESIDENT_BATCH = 0.97, parse_bytes("16GiB"), 32
OF_DEEPSPEED, OF_DEEPSPEED_AT_LARGE, LARGE_BATCH = 1.5, 2.0, 32
ALIKE = ("part", "layers", "batch", "hidden", "heads", "vocabulary", "sequence", "dtype", "steps", "lr", "device")
"""What a call and its reference have in common."""
SPLIT = {"compute": "compute_s", "fetch wait": "fetch_wait_s", "update wait": "update_wait_s"}
COLUMNS = (
    *("", "layers", "batch", "cap", "window", "resident", "activations", "samples/s", "of resident", "a step"),
    *("TFLOPS", "peak", "planned", *SPLIT, "status"),
)


@dataclass(kw_only=True)
class Row:
    """All calls of one setting, which is ``call`` as recorded, without its round.

    ``rates`` are samples per second and ``of_resident`` ratios to the reference's call before, both by round. ``last``
    is the last record that is not of a failure. ``wrong`` tells losses that are not the reference's, ``unseen`` that
    there is none to compare with, ``error`` why the last call failed.
    """

    call: dict[str, Any]
    rates: dict[int, float] = field(default_factory=dict)
    of_resident: dict[int, float] = field(default_factory=dict)
    last: Record = field(default_factory=dict)
    wrong: str = ""
    unseen: bool = False
    error: str = ""

    @property
    def rate(self) -> float:
        """The median of its rates; only of one that has any."""
        return median(self.rates.values())


def rows(records: Iterable[Record]) -> list[Row]:
    """Returns the rows of ``records``, in the order of their first calls."""
    found: dict[str, Row] = {}
    reference: dict[tuple[Any, ...], float] = {}
    records = list(records)
    trained = [record for record in records if "error" not in record]
    judged = {
        id(record): (wrong, beside)
        for record, wrong, beside in zip(trained, disagreements(trained), compared(trained), strict=True)
    }
    for record in records:
        call = dict(record["call"])
        number, within = call.pop("round"), tuple(call[name] for name in ALIKE)
        row = found.setdefault(json.dumps(call, sort_keys=True), Row(call=call))
        if "error" in record:
            row.error = record["error"]
            continue
        rate = record["summary"]["samples_per_s"]
        row.rates[number], row.last, row.error = rate, record, ""
        if call["method"] == REFERENCE:
            reference[within] = rate
        elif within in reference:
            row.of_resident[number] = rate / reference[within]
        wrong, beside = judged[id(record)]
        row.wrong = row.wrong or ("" if wrong is None else str(wrong))
        row.unseen = not beside
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal, whether it is ``met`` (None where that is not known), and the numbers that say so."""

    text: str
    met: bool | None
    numbers: str

    def __str__(self) -> str:
        return f"{'open' if self.met is None else 'met' if self.met else 'MISSED'}: {self.text}: {self.numbers}"


def goals(found: Sequence[Row]) -> list[Goal]:
    """Returns what comes of each goal: of the resident run, of DeepSpeed under each cap, of the losses.

    The first two are goals of the part "methods" alone.
    """
    under_caps = [row for row in found if row.call["part"] == "methods" and row.call["cap"] is not None]
    places = dict.fromkeys((row.call["batch"], row.call["cap"]) for row in under_caps)
    wrong = [row for row in found if row.wrong]
    unseen = sum(row.unseen for row in found if row.rates)
    ran = sum(bool(row.rates) for row in found)
    compared_all = f"{ran} settings, {len(wrong)} wrong, {unseen} not compared"
    told = wrong or (ran and not unseen)  # where none ran nothing is known of losses
    correct = Goal(text="correct losses", met=not wrong if told else None, numbers=compared_all)
    here = [row for row in under_caps if (row.call["batch"], row.call["cap"]) == (RESIDENT_BATCH, RESIDENT_CAP)]
    resident = [_of_resident(here)] if under_caps else []
    return [*resident, *(_of_deepspeed(under_caps, *place) for place in places), correct]


def _of_resident(under_cap: Sequence[Row]) -> Goal:
    text = f"at least {OF_RESIDENT} of the resident run at batch {RESIDENT_BATCH}, under {format_bytes(RESIDENT_CAP)}"
    ours = _fastest([row for row in under_cap if row.call["method"] == STRONGHOLD and not row.wrong])
    if ours is None or not ours.of_resident:
        return Goal(text=text, met=None, numbers="not measured")
    ratio = median(ours.of_resident.values())
    return Goal(text=text, met=ratio >= OF_RESIDENT, numbers=f"{_ratios(ours.of_resident)} ({way(ours)})")


def _of_deepspeed(under_caps: Sequence[Row], batch: int, cap: int) -> Goal:
    goal = OF_DEEPSPEED_AT_LARGE if batch >= LARGE_BATCH else OF_DEEPSPEED
    text = f"at least {goal:g} of DeepSpeed's best at batch {batch}, under {format_bytes(cap)}"
    here = [row for row in under_caps if (row.call["batch"], row.call["cap"]) == (batch, cap)]
    ours = _fastest([row for row in here if row.call["method"] == STRONGHOLD and not row.wrong])
    theirs = [row for row in here if row.call["method"] in DEEPSPEED]
    best = _fastest(theirs)
    if ours is None or best is None:
        lacking = "stronghold" if ours is None else "DeepSpeed's, all of which failed" if theirs else "DeepSpeed's"
        return Goal(text=text, met=None, numbers=f"there is no run of {lacking}")
    ratios = {number: rate / best.rates[number] for number, rate in ours.rates.items() if number in best.rates}
    if not ratios:
        return Goal(text=text, met=None, numbers="there is no round with both")
    numbers = f"{_ratios(ratios)} ({way(ours)} against {best.call['method']})"
    met = median(ratios.values()) >= goal
    if met and (lacking := [name for name in GOALS if name not in {row.call["method"] for row in here}]):
        return Goal(text=text, met=None, numbers=f"{numbers}, and {', '.join(lacking)} not measured")
    return Goal(text=text, met=met, numbers=numbers)


def _fastest(found: Iterable[Row]) -> Row | None:
    return max((row for row in found if row.rates), key=lambda row: row.rate, default=None)


def way(row: Row) -> str:
    """Returns how a row trains, in a word or two."""
    call = row.call
    return call["method"] if call["method"] != STRONGHOLD else f"{STRONGHOLD}, {call['update']}"


def notes(found: Sequence[Row]) -> list[str]:
    """Returns what there is to say below the table: why a setting is wrong or has failed."""
    said = [(row, f"WRONG, {row.wrong}") for row in found if row.wrong]
    said += [(row, f"failed, {row.error}") for row in found if row.error]
    return [f"{_in_words(row)}: {reason}" for row, reason in said]


def _in_words(row: Row) -> str:
    call = row.call
    window = "" if call["window"] is None else f", window {call['window']}"
    cap = "" if call["cap"] is None else f", under {format_bytes(call['cap'])}"
    return f"{way(row)}, {call['layers']} layers, batch {call['batch']}{window}{cap}"


def table(found: Sequence[Row]) -> Table:
    """Returns a line for each row, by model, batch, cap and window; without the columns that none has anything in."""

    def place(row: Row) -> list[int]:
        return [row.call[name] or 0 for name in ("layers", "batch", "cap", "window")]

    drawn = Table(title=_title(found), title_justify="left", box=box.SIMPLE)
    lines = [_cells(row) for row in sorted(found, key=place)]
    for name in COLUMNS:
        if any(line.get(name) for line in lines):
            drawn.add_column(name, justify="left" if name in ("", "status") else "right", no_wrap=True)
    for line in lines:
        drawn.add_row(*(line.get(str(column.header), "") for column in drawn.columns))
    return drawn


def _title(found: Sequence[Row]) -> str:
    calls = [row.call for row in found]
    parameters = sorted({row.last["parameters"] for row in found if row.last})
    sizes = " to ".join(dict.fromkeys(format_count(size) for size in parameters[:1] + parameters[-1:]))
    shared = {name: sorted({str(call[name]) for call in calls}) for name in ("part", "dtype", "sequence", "device")}
    part, dtype, sequence, device = (" and ".join(values) for values in shared.values())
    return f"{part}: {sizes or 'no'} parameters, {dtype}, {sequence} tokens per sample, on {device}"


def _cells(row: Row) -> dict[str, str]:
    """Returns the cells of a row by column; what is of one step or of memory is of the last call."""
    call, last = row.call, row.last
    cells = {"": way(row), "layers": str(call["layers"]), "batch": str(call["batch"]), "status": _status(row)}
    cells["cap"] = "" if call["cap"] is None else format_bytes(call["cap"])
    if not row.rates:
        return cells
    summary, peak = last["summary"], last["summary"]["peak_device_bytes"]
    cells |= {
        "samples/s": _ratios(row.rates),
        "of resident": _ratios(row.of_resident) if row.of_resident else "",
        "a step": format_seconds(summary["iteration_s"]),
        "TFLOPS": f"{summary['tflops']:.3g}",
        "peak": format_bytes(peak) if peak else "",
    }
    if call["method"] in FITTED or last["micro_batch"]:
        cells["activations"] = " x ".join(str(last[name]) for name in ("activations", "micro_batch") if last[name])
    if placed := last.get("placement"):
        timed = last["steps"][WARM_UP_STEPS:] or last["steps"]
        cells |= {"window": str(placed["window"]), "resident": str(placed["resident"])}
        cells |= {"planned": format_bytes(placed["device_bytes"])}
        cells |= {name: format_seconds(median(step[of] for step in timed)) for name, of in SPLIT.items()}
    return cells


def _status(row: Row) -> str:
    if row.wrong:
        return "WRONG"
    return "failed" if row.error else "not compared" if row.unseen else ""


def _ratios(values: dict[int, float]) -> str:
    """Returns the median of ``values``, and their quartiles where there are several."""
    found = spread(values.values())
    quartiles = f" ({found['low']:.4g} to {found['high']:.4g})" if len(values) > 1 else ""
    return f"{found['median']:.4g}{quartiles}"
