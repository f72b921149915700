"""What the records of probe.py come to: tables, with the speed of light beside each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from stronghold.lab.records.json_lines import Record
from stronghold.units import format_bytes, format_seconds

Call = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Light:
    """What the data sheet of a device gives: dense TFLOP/s by kind, GB/s of its memory and of its link, each way."""

    tflops: Mapping[str, float]
    memory: float
    link: float = 64.0


SHEETS = {
    "H200": Light(tflops={"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}, memory=4800.0),
    "H100 PCIe": Light(tflops={"bf16": 756.0, "tf32": 378.0, "fp32": 51.0}, memory=2000.0),
    "H100 NVL": Light(tflops={"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}, memory=3900.0),
    "H100": Light(tflops={"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}, memory=3350.0),
}
"""NVIDIA's data sheets of the H100 and the H200, by a part of the device's name; the link is PCIe 5 x16, raw."""


def light_of(name: str) -> Light | None:
    """Returns the data sheet of the device called ``name``, or None where there is none here."""
    return next((sheet for part, sheet in SHEETS.items() if part in name), None)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of a part's records; ``limit`` is its speed of light in its unit, by the record's call, 0 if unknown."""

    title: str
    name: str
    limits: Mapping[str, float] = field(default_factory=dict)

    def limit(self, call: Call) -> float:
        return self.limits.get(str(call.get("kind", "")), 0.0)


def tables(records: Sequence[Record], device: str, name: str = "") -> list[Table]:
    """Returns a table for each part that has results; ``name`` is the model of the device."""
    light = light_of(name)
    link = f" (speed of light {light.link:g})" if light else ""
    products, memory = (light.tflops, {"": light.memory}) if light else ({}, {})
    columns = {
        "product": (f"matrix products on {device}", [Column(title="TFLOP/s", name="tflops", limits=products)]),
        "launch": (
            "microseconds of the launching thread, for one of a burst",
            [Column(title="each", name="us"), Column(title="until the device is done", name="us_with_device")],
        ),
        "pinning": ("pinning host memory", [Column(title="s per GiB", name="s_per_gib")]),
        "host memory": ("host memory, with the traffic of an update", [Column(title="GB/s", name="gb_per_s")]),
        "device memory": (
            f"memory of {device}, copied within",
            [Column(title="GB/s", name="gb_per_s", limits=memory)],
        ),
    }
    drawn = [_links(records, f"link of {device}, GB/s of each way{link}")]
    drawn += [_lines(records, part, *given) for part, given in columns.items()]
    return [table for table in drawn if table.row_count]


def _links(records: Sequence[Record], title: str) -> Table:
    found: dict[int, dict[str, str]] = {}
    for record in _of(records, "link"):
        call = record["call"]
        refused = call["memory"] == "pinned" and not record["pinned"]
        column = f"{call['way']}, {'not pinned' if refused else call['memory']}"
        found.setdefault(call["bytes"], {})[column] = f"{record['gb_per_s']:.3g}"
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE)
    drawn.add_column("size", justify="right")
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    for column in columns:
        drawn.add_column(column, justify="right")
    for size in sorted(found):
        drawn.add_row(format_bytes(size), *(found[size].get(column, "") for column in columns))
    return drawn


def _lines(records: Sequence[Record], part: str, title: str, columns: Sequence[Column]) -> Table:
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE)
    drawn.add_column("")
    for column in columns:
        drawn.add_column(column.title, justify="right")
        if column.limits:
            drawn.add_column("speed of light", justify="right")
            drawn.add_column("share", justify="right")
    for record in _of(records, part):
        cells = [in_words(record["call"])]
        for column in columns:
            rate, limit = record[column.name], column.limit(record["call"])
            cells.append(f"{rate:.4g}")
            if column.limits:
                cells += [f"{limit:g}", f"{rate / limit:.0%}"] if limit else ["", ""]
        drawn.add_row(*cells)
    return drawn


def _of(records: Sequence[Record], part: str) -> list[Record]:
    return [record for record in records if record["call"]["part"] == part and "error" not in record]


def failures(records: Sequence[Record]) -> list[str]:
    """Returns a line for each reason why something was not measured, with all that it is of."""
    found: dict[str, list[str]] = {}
    for record in records:
        if "error" in record:
            found.setdefault(record["error"], []).append(f"{record['call']['part']} ({in_words(record['call'])})")
    return [f"not measured: {'; '.join(names)}: {reason}" for reason, names in found.items()]


def in_words(call: Call) -> str:
    """Returns what a call measures, without its part."""
    match call["part"]:
        case "link":
            return f"{call['way']}, {call['memory']}, {format_bytes(call['bytes'])}"
        case "product":
            lasting = f", for {format_seconds(call['for_s'])}" if "for_s" in call else ""
            return f"{call['kind']}, {call['m']} x {call['k']} x {call['n']}{lasting}"
        case "launch":
            return str(call["what"])
        case "pinning":
            return f"{format_bytes(call['bytes'])}, {'touched before' if call['touched'] else 'untouched'}"
        case "host memory":
            return f"{call['threads']} thread{'s' * (call['threads'] > 1)}"
        case _:
            return format_bytes(call["bytes"])


def best_product(records: Sequence[Record], kind: str = "bf16") -> float | None:
    """Returns the TFLOP/s of the fastest product of ``kind``, or None where none was measured."""
    rates = [record["tflops"] for record in _of(records, "product") if record["call"]["kind"] == kind]
    return max(rates, default=None)
