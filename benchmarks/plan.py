"""How well the step model foretells the engine's steps: random machines, models and settings, run for real.

    python -m benchmarks.plan [--machines 200] [--seed 0] [--clock-only] [--pace 1.0]

Each case draws a model of 4 to 16 layers, its settings and a machine's speeds. The real engine trains it on
stronghold.device.throttled, by that device's clocks and by the wall, and every third one over a disk of given speed, by
the wall alone; the planner's step model gets the units' bytes and the machine's rates. A case that is more than 3 % off
by the wall is measured again at a third of the pace, so that what else this machine does counts a third as much; both
numbers are kept, and the second counts. Prints a table, and appends one JSON line a case to results/plan.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.plan_cases import Case, draw, run, slower
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "plan.jsonl"
LIMIT = 0.03
"""Errors above this are looked at again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=200, help="cases to draw (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number (default: 0)")
    parser.add_argument("--clock-only", action="store_true", help="do not sleep; compare the simulated clocks alone")
    parser.add_argument("--pace", type=float, default=1.0, help="how many times as slow to play (default: 1.0)")
    arguments = parser.parse_args()
    console, described, found = Console(width=150), describe_machine(), []
    for seed in track(range(arguments.seed, arguments.seed + arguments.machines), "playing", console=console):
        on_disk = not arguments.clock_only and seed % 3 == 2
        found.append(_measured(slower(draw(seed, on_disk=on_disk), arguments.pace), paced=not arguments.clock_only))
        append_record(RESULTS, {"benchmark": "plan", **found[-1], **described})
        if found[-1]["errors_at_first"]:
            console.print(f"case {seed}: {found[-1]['errors_at_first'][0]:+.2%}, again {found[-1]['error']:+.2%}")
    console.print(_table(found))


def _measured(case: Case, *, paced: bool) -> dict[str, Any]:
    outcome, errors = run(case, paced=paced), []
    if paced and abs(outcome.error) > LIMIT:
        errors, outcome = [outcome.error], run(slower(case, 3), paced=True)
    return {
        "seed": case.seed,
        "layers": len(case.widths),
        "window": case.window,
        "resident": case.resident,
        "update": case.update,
        "activations": case.activations,
        "micro_batch": case.micro_batch,
        "dtype": str(case.dtype).removeprefix("torch."),
        "on_disk": case.on_disk,
        "seconds": case.seconds,
        "longest": outcome.planned.longest,
        "longest_s": outcome.planned.busy_s[outcome.planned.longest],
        "planned_s": outcome.planned.step_s,
        "clock_s": outcome.clock_s,
        "wall_s": outcome.wall_s,
        "error": outcome.error,
        "errors_at_first": errors,
    }


def _table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="planned steps against the engine's")
    for column in ("store", "longest", "cases", "mean error", "largest", "within 3 %", "the longest resource alone"):
        table.add_column(column, justify="left" if column in ("store", "longest") else "right")
    for on_disk in (False, True):
        for longest in ("", *sorted({one["longest"] for one in found})):
            rows = [one for one in found if one["on_disk"] == on_disk and longest in ("", one["longest"])]
            if not rows:
                continue
            errors = [abs(one["error"]) for one in rows]
            alone = statistics.mean(one["longest_s"] / (one["wall_s"] or one["clock_s"]) - 1 for one in rows)
            table.add_row(
                "disk" if on_disk else "RAM",
                longest or "all",
                str(len(rows)),
                f"{statistics.mean(errors):.2%}",
                f"{max(errors):.2%}",
                f"{sum(error <= LIMIT for error in errors) / len(rows):.1%}",
                f"{alone:+.1%}",
            )
    return table


if __name__ == "__main__":
    main()
