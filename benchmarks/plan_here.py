"""How well plans foretell steps on this machine: small models, planned, and then trained for real on the CPU.

    python -m benchmarks.plan_here [--rounds 3] [--seconds 20] [--only gpt] [--quick]

Each round measures the machine anew (stronghold.probe) and then plans and trains each case in a process of its own: a
reference GPT, a Llama of transformers and an MLP, in RAM and over a disk, with small and large batches and several of
them in a step, of shapes that the probe does not measure. Prints predicted and measured seconds of a step and peak
resident memory, and appends a JSON line for each case and round to results/plan_here.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import stronghold
from benchmarks.plan_here_cases import CASES, in_a_process, run
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "plan_here.jsonl"
GOAL = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measure and train so often (3)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="N", help="that a probe takes (20)")
    parser.add_argument("--only", default="", metavar="PART", help="cases with this in their names")
    parser.add_argument("--folder", default=tempfile.gettempdir(), metavar="DIR", help="where layers on disk are")
    parser.add_argument("--quick", action="store_true", help="record nothing")
    parser.add_argument("--machine", metavar="FILE", help="do not probe, but take this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # in the process of its own
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(run(options.case, options.machine, options.folder)))
        return 0
    console, described, found = Console(width=150), describe_machine(), list[dict[str, Any]]()
    names = [name for name in CASES if options.only in name]
    with tempfile.TemporaryDirectory(prefix="stronghold-plan-", dir=options.folder) as folder:
        for number in range(options.rounds):
            file = options.machine or f"{folder}/machine.json"
            if options.machine is None:
                disks = [folder] if any("disk" in name for name in names) else []
                console.print(f"round {number + 1}: measuring")
                stronghold.probe("cpu", directories=disks, seconds=options.seconds, keep=False).write(file)
            for name in names:
                one = {"benchmark": "plan_here", "round": number, **_trained(name, file, folder)}
                found.append(one)
                console.print(_line(one))
                if not options.quick:
                    append_record(RESULTS, {**one, **described})
    console.print(_table(names, found))
    return 0


def _trained(name: str, machine: str, folder: str) -> dict[str, Any]:
    arguments = ("--case", name, "--machine", machine, "--folder", folder)
    return {"case": name, **in_a_process("benchmarks.plan_here", *arguments)}


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['case']}: planned {one['planned_s']:.3f} s, measured {one['measured_s']:.3f} s "
        f"({one['planned_s'] / one['measured_s'] - 1:+.0%}), memory {one['planned_bytes'] / one['peak_bytes'] - 1:+.1%}"
    )


def _table(names: Sequence[str], found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="planned steps against trained ones, medians of rounds")
    for column in ("case", "planned s", "measured s", "error", "range", "planned MiB", "measured MiB", "error"):
        table.add_column(column, justify="left" if column == "case" else "right")
    errors = []
    for name in names:
        rows = [one for one in found if one["case"] == name]
        ratios = sorted(one["planned_s"] / one["measured_s"] - 1 for one in rows)
        planned, measured, taken, peak = (
            statistics.median(one[key] for one in rows)
            for key in ("planned_s", "measured_s", "planned_bytes", "peak_bytes")
        )
        errors.append(statistics.median(ratios))
        table.add_row(
            name,
            f"{planned:.3f}",
            f"{measured:.3f}",
            f"{errors[-1]:+.1%}",
            f"{ratios[0]:+.0%} to {ratios[-1]:+.0%}",
            f"{taken / 2**20:.0f}",
            f"{peak / 2**20:.0f}",
            f"{taken / peak - 1:+.1%}",
        )
    within = sum(abs(error) <= GOAL for error in errors)
    table.caption = f"{within} of {len(errors)} within {GOAL:.0%}"
    return table


if __name__ == "__main__":
    sys.exit(main())
