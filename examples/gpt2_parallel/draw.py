"""Draws what compare.py measured: training time and tokens per second, in two figures each, as PNG and as SVG.

    python examples/gpt2_parallel/draw.py gpt2_parallel.jsonl

One shows data parallelism beside one process; the other stages beside stages without micro-batches, and one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

Record = dict[str, Any]

FIGURES = {
    "data_parallelism": ("one process", "data parallelism"),
    "stages": ("one process", "stages without micro-batches", "stages"),
}
QUANTITIES = {
    "training_seconds": "training time (s), mean over ranks",
    "tokens_per_second": "tokens per second, sum over ranks",
}
COLOURS = {  # Okabe and Ito's, told apart by people of every colour vision
    "one process": "#999999",
    "data parallelism": "#0072B2",
    "stages without micro-batches": "#E69F00",
    "stages": "#009E73",
}
ALIKE = ("layers", "hidden", "heads", "sequence", "text", "batch", "lr", "warmup", "steps", "host", "versions")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gpt2_parallel",  # the same bytes each time
}


class Spread(NamedTuple):
    """A quantity over the runs of one way."""

    median: float
    least: float
    most: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="what compare.py wrote to --out; the figures go beside it")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.records.read_text(encoding="utf-8").splitlines()]
    if missing := COLOURS.keys() - {record["way"] for record in records}:
        parser.error(
            f"there must be a run of each way (got none by {', '.join(sorted(missing))}); pass compare.py's file"
        )
    if differing := [name for name in ALIKE if any(record[name] != records[0][name] for record in records)]:
        parser.error(f"all runs must have the same {', '.join(differing)} (they differ); pass those of one compare.py")
    for path in draw(records, options.records.with_suffix("")):
        print(path)


def draw(records: Sequence[Record], stem: Path) -> list[Path]:
    """Draws ``stem``_data_parallelism_training_seconds.png and seven others; returns their paths."""
    paths = []
    with plt.rc_context(STYLE):
        for name, (quantity, label) in product(FIGURES, QUANTITIES.items()):
            figure = bars([runs for runs in by_way(records) if runs[0]["way"] in FIGURES[name]], quantity, label)
            for suffix in ("png", "svg"):
                paths.append(stem.with_name(f"{stem.name}_{name}_{quantity}.{suffix}"))
                figure.savefig(paths[-1], dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            plt.close(figure)
    return paths


def bars(ways: Sequence[Sequence[Record]], quantity: str, label: str) -> Figure:
    """Returns a figure with a bar for each way, and on it a line from the least to the most of its runs."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    spreads = [spread(runs, quantity) for runs in ways]
    for place, (runs, (median, least, most)) in enumerate(zip(ways, spreads, strict=True)):
        axes.bar(place, median, 0.6, color=COLOURS[runs[0]["way"]], yerr=[[median - least], [most - median]], capsize=4)
        text = f"{median:.2f}" if median < 100 else f"{median:,.0f}"
        axes.annotate(text, (place, most), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(ways)), [below(runs[0]) for runs in ways])
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(0, 1.1 * max(most for _, _, most in spreads))
    one = ways[0][0]
    axes.set_title(
        f"GPT-2 of {one['layers']} blocks of width {one['hidden']}, {one['steps']} steps of {one['batch']} x "
        f"{one['sequence']} tokens, {one['host']['processor']}\nmedian of {len(ways[0])} runs; lines from the least to "
        "the most",
        loc="left",
        fontsize=9,
    )
    return figure


def below(record: Record) -> str:
    """Returns what stands below a bar."""
    processes, cores = record["processes"], record["processes"] * record["cores_each"]
    lines = [
        record["way"].replace(" without ", "\nwithout "),
        (f"{processes} processes, " if processes > 1 else "") + f"{cores} core{'s' * (cores > 1)}",
    ]
    if record["micro_batches"] > 1:
        lines.append(f"{record['micro_batches']} micro-batches")
    return "\n".join(lines)


def by_way(records: Sequence[Record]) -> list[list[Record]]:
    """Returns the runs of each way: one process, on one core and on several, and those of more processes."""
    runs: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        runs.setdefault((list(COLOURS).index(record["way"]), record["cores_each"]), []).append(record)
    return [runs[key] for key in sorted(runs)]


def spread(runs: Sequence[Record], quantity: str) -> Spread:
    values = [run[quantity] for run in runs]
    return Spread(statistics.median(values), min(values), max(values))


if __name__ == "__main__":
    main()
