"""Draws what compare.py measured: seconds per batch of each partition, the best one marked, and the ideal.

python examples/pipeline_cnn/draw.py runs.jsonl [-o partitions.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from tables import sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="what compare.py has written to --out")
    parser.add_argument("-o", "--out", type=Path, default=Path("partitions.png"), help="a .png or .svg")
    options = parser.parse_args()
    compared: dict[tuple, dict[str, dict]] = {}
    for line in options.records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["table"] == "partitions":
            settings = tuple(record[name] for name in ("model", "batch", "micro_batches", "stages", "cores", "image"))
            compared.setdefault(settings, {})[str(record["balance"])] = record  # of runs alike, the last one
    if not compared:
        parser.error(f"{options.records} has no partition that compare.py measured; pass what it wrote to --out")
    size = (5.5 * len(compared), 3.5)
    figure, axes = plt.subplots(1, len(compared), figsize=size, squeeze=False, layout="constrained")
    for axis, (settings, named) in zip(axes[0], compared.items(), strict=True):
        rows = list(named.values())
        for place, row in enumerate(rows):
            seconds = row["seconds"]
            spread = [[seconds - min(row["batch_seconds"])], [max(row["batch_seconds"]) - seconds]]
            axis.barh(place, seconds, xerr=spread, color="tab:green" if row["best"] else "tab:gray", capsize=3)
        labels = [f"{row['balance'] if isinstance(row['balance'], str) else 'given'}\n{sizes(row)}" for row in rows]
        axis.set_yticks(range(len(rows)), labels)
        axis.invert_yaxis()
        ideal = axis.axvline(rows[0]["ideal_seconds"], color="black", linestyle="--", label="ideal: equal stages")
        axis.set_title(f"{settings[0]}: batch {settings[1]}, {settings[3]} stages on {settings[4]} cores")
        axis.set_xlabel("seconds per batch: median, least to most")
    fastest = Patch(color="tab:green", label="the fastest")
    figure.legend(handles=[fastest, ideal], loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()
