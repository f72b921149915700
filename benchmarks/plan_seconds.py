"""How long a plan takes to find, of few layers and of many, in one process and in several.

    python -m benchmarks.plan_seconds [--cases 100x1 300x1 1000x32] [--rounds 3] [--beside DIRECTORY]

Each case is layers x processes of the reference GPT on the meta device, on the tests' GPU with 24 GiB and messages
between processes, planned with ``stronghold.plan`` in a process of its own behind a plan of two small layers, so that
what is imported for the first plan does not count. ``--beside`` is another checkout of this repository, built, whose
plans are timed in turn with this one's, and must be the same. Prints medians over the rounds of a process's own time,
which others on the machine lengthen less than the wall's, and appends a JSON line a case to
results/plan_seconds.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from tests.planner.machines import about, machine

HERE = Path(__file__).parent.parent
RESULTS = HERE / "results" / "plan_seconds.jsonl"


def main() -> None:
    from stronghold.lab.records.json_lines import append_record, describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["100x1", "300x1", "1000x32"], help="layers x processes")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument("--beside", type=Path, help="another checkout, timed in turn with this one")
    arguments = parser.parse_args()
    checkouts = {"this": HERE} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    table = Table(title="Seconds to find a plan, own time: median (least to most)")
    for column in ("layers", "processes", *checkouts):
        table.add_column(column, justify="right")
    described = describe_machine()
    for case in arguments.cases:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
        for _ in range(arguments.rounds):
            for name, checkout in checkouts.items():
                runs[name].append(_timed(checkout, case))
        assert len({json.dumps(run["plan"], sort_keys=True) for each in runs.values() for run in each}) == 1, (
            "two plans"
        )
        own_s = {name: [run["own_s"] for run in each] for name, each in runs.items()}
        shown = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in own_s.values()]
        table.add_row(*case.split("x"), *shown)
        layers, processes = map(int, case.split("x"))
        record = {
            "benchmark": "plan_seconds",
            "layers": layers,
            "processes": processes,
            "plan": runs["this"][0]["plan"],
        }
        for name, checkout in checkouts.items():
            record[name] = {
                "commit": subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True).strip(),
                "own_s": own_s[name],
                "wall_s": [run["wall_s"] for run in runs[name]],
            }
        append_record(RESULTS, {**record, "load": os.getloadavg(), **described})
    Console(width=110).print(table)


def _timed(checkout: Path, case: str) -> dict[str, Any]:
    """Returns what a process found that has the package of ``checkout``, and this file."""
    command = [sys.executable, "-c", f"from benchmarks.plan_seconds import timed; timed({case!r})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(HERE)))}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def timed(case: str) -> None:
    """Plans a case behind a small one, and prints what that took and the plan's settings and step."""
    layers, processes = map(int, case.split("x"))
    _plan(2, 2 if processes > 1 else 1, hidden=96, sequence=24)
    begin, began = time.perf_counter(), time.process_time()
    plan = _plan(layers, processes, hidden=1024, sequence=512)
    wall_s, own_s = time.perf_counter() - begin, time.process_time() - began
    told = {"settings": plan.settings, "parallel": plan.parallel, "step_s": plan.step_s.likely}
    print(json.dumps({"wall_s": wall_s, "own_s": own_s, "plan": told}))


def _plan(layers: int, processes: int, *, hidden: int, sequence: int) -> Any:
    with torch.device("meta"):
        config = GPTConfig(layers=layers, hidden=hidden, heads=16, sequence=sequence, vocabulary=32000)
        row = LayeredGPT(GPT(config))
    here = machine(processes={"message_s": about(1e-4), "bytes_per_s": about(5e9)}, host_memory_bytes=2**40 * processes)
    batch = 64 if processes > 1 else 8
    ids = torch.empty((batch, sequence), dtype=torch.int64, device="meta")
    return stronghold.plan(row, machine=here, inputs=[ids, ids], dtype=torch.bfloat16, batch=batch, processes=processes)


if __name__ == "__main__":
    main()
