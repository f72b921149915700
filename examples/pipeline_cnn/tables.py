"""What was measured, as tables to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Record = Mapping[str, Any]


def partitions_table(records: Sequence[Record], best: Record) -> Table:
    one = records[0]
    alone = one["ideal_seconds"] * one["cores"]
    table = Table(
        title=f"{one['model']}: batch {one['batch']} in {one['micro_batches']} micro-batches, {one['stages']} stages "
        f"on {one['cores']} cores",
        caption=f"ideal: {one['ideal_seconds']:.3f} s, one process's {alone:.3f} s over {one['cores']} cores",
        min_width=70,
    )
    table.add_column("balance", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    for column in ("s/batch", "least", "most", "images/s", "over ideal"):
        table.add_column(column, justify="right")
    table.add_column("")
    for record in records:
        name = record["balance"] if isinstance(record["balance"], str) else "given"
        mark = "best" if record is best else ""
        table.add_row(name, sizes(record), *speed(record), mark, style="bold" if mark else "")
    return table


def batches_table(records: Sequence[Record], best: Record) -> Table:
    table = Table(title=f"{best['model']}: the best partition ({sizes(best)}) batch by batch", min_width=70)
    for column in ("batch", "micro-batches", "s/batch", "least", "most", "images/s", "over ideal"):
        table.add_column(column, justify="right")
    for record in records:
        table.add_row(str(record["batch"]), str(record["micro_batches"]), *speed(record))
    return table


def sizes(record: Record) -> str:
    return " ".join(map(str, record["layers"]))


def speed(record: Record) -> list[str]:
    batches = record["batch_seconds"]
    return [
        *(f"{seconds:.3f}" for seconds in (record["seconds"], min(batches), max(batches))),
        f"{record['images_per_second']:.2f}",
        f"{record['over_ideal']:+.1%}",
    ]
