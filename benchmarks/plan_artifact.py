"""How well the step model tells the artifact's times on a V100: fitted to four of its runs, it tells the others.

    python -m benchmarks.plan_artifact

The paper's artifact logged its own STRONGHOLD with 16 to 92 layers at window 15, and with 32 layers at windows 2 to 15
(stronghold.lab.cases.published). Its first layers stay on the device as many as the window has, so they are resident
here. Four constants are fitted by least squares of logarithms: a layer's forward pass (its backward pass takes three
times as long, with the recomputation), the link's bandwidth, the host's update, and what is outside the layers. Prints
a table, and appends the constants with all predictions as a JSON line to results/plan_artifact.jsonl.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stronghold.lab.cases.machines import V100
from stronghold.lab.cases.published import PUBLISHED, WHERE
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.step import step_time
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings

RESULTS = Path(__file__).parent.parent / "results" / "plan_artifact.jsonl"
FITTED = ((16, 15), (92, 15), (32, 2), (48, 15))
"""Layers and window of the runs that the constants are fitted to."""
ELEMENTS = 12 * V100.hidden**2 + 13 * V100.hidden
DEVICE_UPDATE_NS = 0.031
"""28 bytes per parameter at the 900 GB/s of a V100's memory."""
BEGIN = {"forward_s": 0.035, "link_bytes_per_s": 4e9, "host_update_ns": 3.0, "root_s": 0.35}


def published() -> dict[tuple[int, int], float]:
    """Returns the artifact's seconds per iteration by layers and window."""
    found: dict[tuple[int, int], float] = {}
    for case in (4, 5):
        found |= {(run.layers, run.window): seconds for run, seconds in PUBLISHED[case].items() if run.window}
    return found


def predicted_s(layers: int, window: int, constants: Mapping[str, float]) -> float:
    """Returns what the step model says of a run."""
    forward_s, link = constants["forward_s"], constants["link_bytes_per_s"]
    layer = LayerWork(
        forward_s=forward_s,
        backward_s=3 * forward_s,
        first_gradient_s=2 * forward_s,
        weight_bytes=4 * ELEMENTS,
        gradient_bytes=4 * ELEMENTS,
        elements=ELEMENTS,
    )
    machine = Machine(
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_update_ns=constants["host_update_ns"],
        device_update_ns=DEVICE_UPDATE_NS,
    )
    settings = StepSettings(window=max(1, min(window, layers - window)), resident=range(min(window, layers)))
    root = RootWork(first=True, forward_s=constants["root_s"] / 2, backward_s=constants["root_s"] / 2)
    return step_time([layer] * layers, machine, settings, [root]).step_s


def fitted() -> dict[str, float]:
    """Returns the constants with which the predictions are nearest to the runs that are fitted to."""
    from scipy.optimize import minimize  # scikit-learn brings it

    runs = published()

    def error(logarithms: list[float]) -> float:
        constants = dict(zip(BEGIN, map(math.exp, logarithms), strict=True))
        return sum(math.log(predicted_s(*run, constants) / runs[run]) ** 2 for run in FITTED)

    found = minimize(error, [math.log(value) for value in BEGIN.values()], method="Nelder-Mead")
    return dict(zip(BEGIN, map(math.exp, found.x), strict=True))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs, constants = published(), fitted()
    predictions = {run: predicted_s(*run, constants) for run in runs}
    table = Table(title=f"steps on {WHERE}")
    for column in ("layers", "window", "measured", "predicted", "error", ""):
        table.add_column(column, justify="right")
    for (layers, window), seconds in sorted(runs.items()):
        predicted = predictions[layers, window]
        row = str(layers), str(window), f"{seconds:.2f} s", f"{predicted:.2f} s", f"{predicted / seconds - 1:+.1%}"
        table.add_row(*row, "fitted" if (layers, window) in FITTED else "")
    Console().print(table)
    record = {
        "benchmark": "plan_artifact",
        "constants": constants,
        "fitted": FITTED,
        "runs": [
            {"layers": layers, "window": window, "measured_s": seconds, "predicted_s": predictions[layers, window]}
            for (layers, window), seconds in sorted(runs.items())
        ],
    }
    append_record(RESULTS, {**record, **describe_machine()})


if __name__ == "__main__":
    main()
