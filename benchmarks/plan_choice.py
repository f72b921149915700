"""Whether what a plan chooses is the best that can be measured: its settings beside others that fit, on the CPU.

    python -m benchmarks.plan_choice [--only gpt] [--others 12] [--rounds 3] [--seconds 20] [--quick | --recorded]

Each case of plan_here.py is planned with everything left open, and with settings drawn at random: windows, resident
layers, kept activations, micro-batches, updates. The half of the others are those that are planned to be the fastest of
the drawn ones, the other half any that fit. All are trained once; then the choice and the three fastest others, in
turns. How far the choice is above another one is the median of the rounds' ratios: a machine may take a tenth longer in
one process than in the next, and then of two equal settings either has the lower median. Prints a table, and appends a
JSON line for each case to results/plan_choice.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

import stronghold
from benchmarks.plan_here_cases import CASES, Case, asked, in_a_process, trained
from stronghold.errors import BudgetError
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "plan_choice.jsonl"
GOAL = 0.05
DRAWN, FASTEST = 40, 3
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PART", help="cases with this in their names")
    parser.add_argument("--others", type=int, default=12, metavar="N", help="settings beside the choice (12)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of the choice and the fastest (3)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="N", help="that a probe takes (20)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), metavar="DIR", help="where layers on disk are")
    parser.add_argument("--quick", action="store_true", help="record nothing")
    parser.add_argument("--recorded", action="store_true", help="train nothing; print what is recorded last of each")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)  # in its own process
    options = parser.parse_args()
    if options.case is not None:
        name, machine = options.case
        print(json.dumps(_compared(name, machine, options.folder, options.others, options.rounds)))
        return 0
    console, described, found = Console(width=150), describe_machine(), list[Row]()
    names = [name for name in CASES if options.only in name]
    if options.recorded:
        newest = {row["case"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
        console.print(_table([newest[name] for name in names if name in newest]))
        return 0
    with tempfile.TemporaryDirectory(prefix="stronghold-plan-", dir=options.folder) as folder:
        machine = f"{folder}/machine.json"
        disks = [folder] if any(CASES[name].on_disk for name in names) else []
        console.print("measuring the machine")
        stronghold.probe("cpu", directories=disks, seconds=options.seconds, keep=False).write(machine)
        for name in names:
            given = ("--folder", folder, "--others", str(options.others), "--rounds", str(options.rounds))
            one = in_a_process("benchmarks.plan_choice", "--case", name, machine, *given)
            found.append({"benchmark": "plan_choice", "case": name, **one})
            above, _ = _above_best(found[-1])
            console.print(f"{name}: {above:+.1%} above the fastest of {found[-1]['trained']}")
            if not options.quick:
                append_record(RESULTS, {**found[-1], **described})
    console.print(_table(found))
    return 0


def _compared(name: str, machine: str, folder: str, others: int, rounds: int) -> Row:
    """Trains the case with the plan's choice and with others, and the fastest of them in turns with the choice."""
    case = CASES[name]
    with asked(case, machine, folder) as (empty, settings):
        chosen = stronghold.plan(empty, **settings)
        rows = [_row(chosen), *map(_row, _others(case, empty, settings, chosen, others, random.Random(name)))]
        for row in rows:
            row["first_s"] = _step_s(case, row["plan"], least_s=1.0)
        finalists = [rows[0], *sorted(rows[1:], key=lambda row: row["first_s"])[:FASTEST]]
        for _ in range(rounds):
            for row in finalists:
                row["taken_s"].append(_step_s(case, row["plan"], least_s=2.0))
    for row in finalists:
        row["measured_s"] = statistics.median(row["taken_s"])
    return {"trained": len(rows), "choice": _plain(rows[0]), "others": [_plain(row) for row in rows[1:]]}


def _above_best(one: Row) -> tuple[float, Row]:
    """Returns by how much of it the choice is above the fastest other setting, and that; 0 and itself where it is none.

    That is the median of the ratios of one round each.
    """
    choice = one["choice"]
    found = (0.0, choice)
    for other in one["others"]:
        if other["taken_s"]:
            ratios = [mine / its for mine, its in zip(choice["taken_s"], other["taken_s"], strict=True)]
            found = max(found, (statistics.median(ratios) - 1, other), key=lambda pair: pair[0])
    return found


def _others(
    case: Case, empty: nn.Module, settings: Mapping[str, Any], chosen: Any, count: int, rng: random.Random
) -> list[Any]:
    """Returns plans with settings that the choice has not, half of them the fastest of the drawn ones."""
    found: dict[str, Any] = {str(_settings(chosen)): chosen}
    for drawn in _drawn(case, chosen, rng):
        try:
            plan = stronghold.plan(empty, **{**settings, **drawn})
        except BudgetError:
            continue
        found.setdefault(str(_settings(plan)), plan)
    plans = sorted(list(found.values())[1:], key=lambda plan: plan.step_s.likely)
    fastest = plans[: count // 2]
    return fastest + rng.sample(plans[count // 2 :], min(count - len(fastest), len(plans) - len(fastest)))


def _drawn(case: Case, chosen: Any, rng: random.Random) -> Iterator[dict[str, Any]]:
    layers = chosen.layers
    batch = len(next(iter(case.inputs.values())))
    for _ in range(DRAWN):
        resident = rng.choice((0, 0, 1, layers // 2, layers))
        yield {
            "window": rng.choice((1, 2, 3, max(1, layers // 2))) if resident < layers else 1,
            "resident": resident,
            "activations": rng.choice((0, layers // 2, layers)),
            "micro_batch": rng.choice((None, None, -(-batch // 2), -(-batch // 4))),
            "update": "deferred" if case.accumulate > 1 else rng.choice(("deferred", "in_backward")),
        }


def _step_s(case: Case, plan: Any, *, least_s: float) -> float:
    taken: float = trained(case, plan, least_steps=3, least_s=least_s)["measured_s"]
    gc.collect()
    return taken


def _row(plan: Any) -> Row:
    return {"plan": plan, "settings": _settings(plan), "planned_s": plan.step_s.likely, "taken_s": []}


def _settings(plan: Any) -> dict[str, Any]:
    return {key: value for key, value in {**plan.settings, **plan.optimizer}.items() if key != "store"}


def _plain(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "plan"}


def _table(found: Sequence[Row]) -> Table:
    table = Table(title="what plans choose beside the fastest of what else was trained")
    for column in ("case", "choice s", "best s", "above it", "trained", "the best's settings"):
        table.add_column(column, justify="left" if column.startswith(("case", "the")) else "right")
    for one in found:
        (above, best), choice = _above_best(one), one["choice"]
        differing = {key: value for key, value in best["settings"].items() if choice["settings"].get(key) != value}
        table.add_row(
            one["case"],
            f"{choice['measured_s']:.3f}",
            f"{best['measured_s']:.3f}",
            f"{above:+.1%}",
            str(one["trained"]),
            ", ".join(f"{key} {value}" for key, value in differing.items()) or "the choice's",
        )
    table.caption = f"{sum(_above_best(one)[0] <= GOAL for one in found)} of {len(found)} within {GOAL:.0%}"
    return table


if __name__ == "__main__":
    sys.exit(main())
