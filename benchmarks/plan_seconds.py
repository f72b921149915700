"""How long a plan takes to find, of few layers and of many, in one process and in several.

    python -m benchmarks.plan_seconds [--cases 100x1 300x1 1000x32] [--rounds 3] [--beside DIRECTORY]

Each case is layers x processes of the reference GPT on the meta device, on the tests' GPU with 24 GiB and messages
between processes, planned with ``stronghold.plan`` in a process of its own behind a plan of two small layers, so that
what is imported for the first plan does not count. Part of it is the model's: it is run on tensors without memory, for
what it computes and keeps; the rest is the search. ``--beside`` is another checkout of this repository, built, whose
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

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
        shown = [
            "; ".join(
                f"{median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f}) {what}"
                for what, taken in (
                    ("in all", [run["own_s"] for run in each]),
                    ("to search", [run["own_s"] - run["traced_s"] for run in each]),
                )
            )
            for each in runs.values()
        ]
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
                "own_s": [run["own_s"] for run in runs[name]],
                "traced_s": [run["traced_s"] for run in runs[name]],
                "wall_s": [run["wall_s"] for run in runs[name]],
            }
        append_record(RESULTS, {**record, "load": os.getloadavg(), **described})
    Console(width=110).print(table)


def _timed(checkout: Path, case: str) -> dict[str, Any]:
    """Returns what a process found that has the package of ``checkout``, and this file."""
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['timed']({case!r})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(HERE)))}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def timed(case: str) -> None:
    """Plans a case behind a small one, and prints what that took and the plan's settings and step."""
    layers, processes = map(int, case.split("x"))
    _planned(_row(2, 96, 24), 2 if processes > 1 else 1)
    row = _row(layers, 1024, 512)
    with _traced() as traced_s:
        begin, began = time.perf_counter(), time.process_time()
        plan = _planned(row, processes)
        wall_s, own_s = time.perf_counter() - begin, time.process_time() - began
    told = {"settings": plan.settings, "parallel": plan.parallel, "step_s": plan.step_s.likely}
    print(json.dumps({"wall_s": wall_s, "own_s": own_s, "traced_s": sum(traced_s), "plan": told}))


@contextmanager
def _traced() -> Iterator[list[float]]:
    """Collects what a process takes to run the model inside of the block."""
    from stronghold.engine.planning.computation import ModelComputation

    taken_s, depth = list[float](), [0]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, depth[0] = time.process_time(), depth[0] + 1
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    taken_s.append(time.process_time() - begin)

        return call

    with ExitStack() as stack:
        for name in ("__init__", "_run_layer", "_run_passes"):
            method = getattr(ModelComputation, name)
            stack.enter_context(patch.object(ModelComputation, name, counted(method)))
        yield taken_s


def _row(layers: int, hidden: int, sequence: int) -> LayeredGPT:
    with torch.device("meta"):
        return LayeredGPT(GPT(GPTConfig(layers=layers, hidden=hidden, heads=16, sequence=sequence, vocabulary=32000)))


def _planned(row: LayeredGPT, processes: int) -> Any:
    here = machine(processes={"message_s": about(1e-4), "bytes_per_s": about(5e9)}, host_memory_bytes=2**40 * processes)
    batch = 64 if processes > 1 else 8
    ids = torch.empty((batch, row.model.config.sequence), dtype=torch.int64, device="meta")
    return stronghold.plan(row, machine=here, inputs=[ids, ids], dtype=torch.bfloat16, batch=batch, processes=processes)


if __name__ == "__main__":
    main()
