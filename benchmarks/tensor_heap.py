"""What training on the CPU takes of memory and time: large tensors in our own heap, in glibc's, and in another one.

    python -m benchmarks.tensor_heap [--rounds 3] [--steps 8] [--only gpt] [--preload /usr/lib/.../libjemalloc.so.2]

Each round trains each model once for each heap, in a process of its own, in turns: the models of plan_here.py, with
a window of two layers, computing activations again and keeping them. Addresses without end are what our own heap
needs, so that a limit on them (2^46 bytes) leaves tensors to glibc's; a library that is loaded before glibc has
them, and all else, where one is given. Prints the medians over rounds of the most that the process had in memory behind
its first two steps, and of the median step, with their ratios to glibc's within a round. Appends a JSON line for each
process to results/tensor_heap.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import stronghold
from benchmarks.plan_here_cases import CASES, peak_bytes, reset_peak
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "tensor_heap.jsonl"
OWN, GLIBC = "own", "glibc"
ACTIVATIONS = ("recompute", "keep")
WARM_UP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="train each model with each heap so often (3)"
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="that are measured (8)")
    parser.add_argument(
        "--only", default="ram large", metavar="PART", help="models with this in their names (ram large)"
    )
    parser.add_argument("--preload", metavar="FILE", help="an allocator's library, as another heap")
    parser.add_argument("--quick", action="store_true", help="record nothing")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # in the process of its own
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(trained(*options.case, steps=options.steps)))
        return 0
    console, described, found = Console(width=150), describe_machine(), list[dict[str, Any]]()
    names = [f"{name}, {activations}" for name in CASES if options.only in name for activations in ACTIVATIONS]
    heaps = [GLIBC, OWN, *([options.preload] if options.preload else [])]
    for number in range(options.rounds):
        for name in names:
            for heap in heaps:
                one = {"benchmark": "tensor_heap", "round": number, **_in_a_process(name, heap, options.steps)}
                found.append(one)
                console.print(
                    f"{name}, {one['heap']}: {one['peak_bytes'] / 2**20:.0f} MiB, {one['step_s']:.3f} s", soft_wrap=True
                )
                if not options.quick:
                    append_record(RESULTS, {**one, **described})
    console.print(_table(names, [Path(heap).name for heap in heaps], found))
    return 0


def _in_a_process(name: str, heap: str, steps: int) -> dict[str, Any]:
    case, activations = name.rsplit(", ", 1)
    command = [sys.executable, "-m", "benchmarks.tensor_heap", "--steps", str(steps), "--case", case, activations, heap]
    preload = {} if heap in (OWN, GLIBC) else {"LD_PRELOAD": heap}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | preload)
    if done.returncode:
        raise RuntimeError(f"{name} has failed in the heap {heap}: {done.stderr[-2000:]}")
    return {"case": name, "heap": Path(heap).name, **json.loads(done.stdout.splitlines()[-1])}


def trained(name: str, activations: str, heap: str, *, steps: int) -> dict[str, Any]:
    """Trains the model, and returns the peak of the process's memory and the median of its steps."""
    if heap == GLIBC:
        resource.setrlimit(resource.RLIMIT_AS, (2**46, 2**46))
    case = CASES[name]
    model = stronghold.offload(case.model(), device="cpu", dtype=case.dtype, window=2, activations=activations)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-5)
    taken = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            reset_peak()
        begin_s = time.perf_counter()
        out = model(**case.inputs)
        (out if isinstance(out, Tensor) else out.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begin_s)
    return {"step_s": statistics.median(taken[WARM_UP:]), "peak_bytes": peak_bytes()}


def _table(names: Sequence[str], heaps: Sequence[str], found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="training on the CPU by heap, medians of rounds")
    for column in ("model", "heap", "MiB", "of glibc's", "range", "step s", "of glibc's", "range"):
        table.add_column(column, justify="left" if column in ("model", "heap") else "right")
    for name in names:
        rows = {heap: [one for one in found if (one["case"], one["heap"]) == (name, heap)] for heap in heaps}
        for heap in heaps:
            cells = [name, heap]
            for key, shown in (("peak_bytes", lambda value: f"{value / 2**20:.0f}"), ("step_s", "{:.3f}".format)):
                ratios = [one[key] / other[key] for one, other in zip(rows[heap], rows[GLIBC], strict=True)]
                cells += [
                    shown(statistics.median(one[key] for one in rows[heap])),
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
