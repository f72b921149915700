"""How long a plan over many processes takes to find: a row of layers on a machine that is made up.

    python -m benchmarks.plan_processes [--layers 1000] [--processes 32] [--batch 64]

The reference GPT of that many layers is on the meta device, the machine the tests' GPU with 24 GiB and messages between
processes. Every split of the processes into stages and replicas of two stages or more is searched, and timed with what
it needs to know of the layers; by the wall and by this process's own time, which others on the machine do not lengthen.
Prints a table, and appends a JSON line a split to results/plan_processes.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stronghold.distributed.process_plans import splits
from stronghold.distributed.staged_inputs import staged_model
from stronghold.engine.planning.model_planner import Limits
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.staged_search import search_stages
from tests.planner.machines import about, machine

RESULTS = Path(__file__).parent.parent / "results" / "plan_processes.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000, help="of the model (default: 1000)")
    parser.add_argument("--processes", type=int, default=32, help="over which it is planned (default: 32)")
    parser.add_argument("--batch", type=int, default=64, help="samples in a step (default: 64)")
    arguments = parser.parse_args()
    described, here = describe_machine(), machine(processes={"message_s": about(1e-4), "bytes_per_s": about(5e9)})
    with torch.device("meta"):
        config = GPTConfig(layers=arguments.layers, hidden=1024, heads=16, sequence=512, vocabulary=32000)
        row = LayeredGPT(GPT(config))
    ids = torch.empty((arguments.batch, 512), dtype=torch.int64, device="meta")
    limits = Limits(device=23 * 2**30, host=2**40, process=300 * 2**20)
    table = Table(title=f"{arguments.layers} layers over {arguments.processes} processes")
    for column in ("stages", "replicas", "wall", "own time", "step"):
        table.add_column(column, justify="right")
    begin, began = time.perf_counter(), time.process_time()
    staged = staged_model(
        row,
        here,
        limits,
        [ids, ids],
        dtype=torch.bfloat16,
        processes=arguments.processes,
        states=("fp32",),
        kepts=(False, True),
        window=None,
        resident=None,
    )
    rows = [("row", "", time.perf_counter() - begin, time.process_time() - began, "")]
    for replicas, each in splits(arguments.processes):
        if each == 1 or arguments.batch % replicas:
            continue
        before, own_before, planner = time.perf_counter(), time.process_time(), staged.planner
        found = search_stages(staged.space, replicas, each, planner.work_of, planner.bytes_of, planner.limits)
        wall_s, own_s = time.perf_counter() - before, time.process_time() - own_before
        step = f"{found.plan.step.step_s:.3f} s" if found.plan else "does not fit"
        rows.append((str(found.plan.choice.stages) if found.plan else str(each), str(replicas), wall_s, own_s, step))
    for stages, of, wall_s, own_s, step in rows:
        table.add_row(stages, of, f"{wall_s:.2f} s", f"{own_s:.2f} s", step)
    wall_s, own_s = time.perf_counter() - begin, time.process_time() - began
    table.add_row("all", "", f"{wall_s:.2f} s", f"{own_s:.2f} s", "")
    Console(width=110).print(table)
    append_record(
        RESULTS,
        {
            "benchmark": "plan_processes",
            "layers": arguments.layers,
            "processes": arguments.processes,
            "batch": arguments.batch,
            "wall_s": wall_s,
            "own_s": own_s,
            "splits": [
                {"stages": stages, "replicas": of, "wall_s": one_s, "own_s": own, "step": step}
                for stages, of, one_s, own, step in rows
            ],
            **described,
        },
    )


if __name__ == "__main__":
    main()
