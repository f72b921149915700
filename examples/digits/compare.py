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
    figure, (learning, testing) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for place, run in enumerate(runs):
        style = {"label": name(run), "linestyle": (3 * place, (3, 3 * (len(runs) - 1)))}  # dashes that do not overlap
        learning.plot(range(1, len(run["losses"]) + 1), run["losses"], **style)
        testing.plot(range(1, len(run["accuracies"]) + 1), [100 * share for share in run["accuracies"]], **style)
    learning.set(xlabel="batch", ylabel="loss", yscale="log")
    testing.set(xlabel="epoch", ylabel="right of the tested, %")
    testing.legend(loc="lower right")
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
