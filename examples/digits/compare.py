"""Sets runs beside one another: a table, and the curves of their losses.

python examples/digits/compare.py runs.jsonl [-o losses.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="what ordinary.py and stages.py have written to --out")
    parser.add_argument("-o", "--out", type=Path, default=Path("losses.png"), help="a .png or .svg (losses.png)")
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.records.read_text(encoding="utf-8").splitlines()]
    if not runs:
        parser.error(f"{options.records} has no run; pass what ordinary.py and stages.py wrote to --out")
    draw(runs, options.out)
    Console().print(table(runs))


def name(run: dict) -> str:
    if run["stages"] == 1:
        return "without stages"
    balance = f"by {run['balance']}" if isinstance(run["balance"], str) else "as given"
    return f"{run['stages']} stages {balance}, {run['micro_batches']} micro-batches"


def table(runs: list[dict]) -> Table:
    """Returns a line for each run; the losses of the first are what the others' are compared with."""
    table = Table()
    for column in ("run", "layers", "images/s", "last loss", "tested", "furthest loss"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        layers = " ".join(str(stage["layers"]) for stage in run.get("memory", []))
        losses = zip(run["losses"], runs[0]["losses"], strict=False)
        table.add_row(
            name(run),
            layers or "all",
            f"{run['images_per_second']:,.0f}",
            f"{run['losses'][-1]:.6f}",
            f"{run['accuracies'][-1]:.1%}",
            f"{max(abs(ours - first) for ours, first in losses):.1e}",
        )
    return table


def draw(runs: list[dict], out: Path) -> None:
    """Draws the first run, and how far the others are from it: on one scale they would be one curve."""
    figure, (learning, apart, testing) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    first = runs[0]
    learning.plot(range(1, len(first["losses"]) + 1), first["losses"], color="black")
    learning.set(title=f"Loss, {name(first)}", xlabel="batch", ylabel="loss", yscale="log")
    for place, run in enumerate(runs[1:]):
        furthest = [abs(ours - one) for ours, one in zip(run["losses"], first["losses"], strict=False)]
        marker = {"marker": "os^v"[place % 4], "markersize": 5 - place % 4, "fillstyle": "none"}
        apart.plot(range(1, len(furthest) + 1), furthest, **marker, linestyle="", color=f"C{place}", label=name(run))
    apart.set(title="How far each loss is from that", xlabel="batch", ylabel="difference")
    apart.set_yscale("symlog", linthresh=1e-9)
    apart.set_ylim(bottom=0)
    same = all(run["accuracies"] == first["accuracies"] for run in runs)
    for run, colour in zip(
        runs[:1] if same else runs, ["black", *(f"C{place}" for place in range(len(runs) - 1))], strict=False
    ):
        share = [100 * tested for tested in run["accuracies"]]
        testing.plot(range(1, len(share) + 1), share, "o-", color=colour)
    testing.set(title="Told right of those tested" + ", in every run" * same, xlabel="epoch", ylabel="%")
    figure.suptitle("Images of digits, learned without stages and in stages")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
