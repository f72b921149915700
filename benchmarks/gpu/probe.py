"""What this machine gives: its link, its memories, its matrix products, and what a launch costs.

    python benchmarks/gpu/probe.py [--only link product] [--least 0.1]

The link each way and both ways at once, from pinned memory (as stronghold pins it) and pageable, 1 MiB to 1 GiB; what
pinning costs; the host's memory by number of threads, with the traffic of an update; the device's memory; matrix
products in bf16, fp32 and tf32, and the best of them for three seconds; what launches, events and waits take of the
thread that issues them. Appends one JSON line for each to probe.jsonl, and draws the tables from those lines. What is
recorded is not measured again. README.md beside this file says what each number should be.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import meanwhile
import torch
from half_hour import Recorded, add_options, budget_of, draw, end_of, error_of, name_of, say, within
from probe_parts import PARTS
from probe_table import best_product, failures, in_words, tables

MIB = 2**20
Call = Mapping[str, Any]
SUSTAINED_S = 3.0
MODEL = ((32768, 2048, 6144), (32768, 2048, 8192), (32768, 8192, 2048), (8192, 4096, 14336), (16384, 4096, 14336))
"""Products of the models that are trained here: tokens, what goes in, what comes out."""


def plan(*, small: bool, cores: int) -> list[Call]:
    """Returns the calls in their order: what the others are judged by comes first."""
    squares = (256, 512) if small else (16384, 8192, 4096, 2048, 1024)
    halves = (256,) if small else (8192, 4096, 2048)
    shapes = () if small else MODEL
    sizes = (MIB, 4 * MIB) if small else (1024 * MIB, 256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB)
    best = squares[0] if small else 8192
    calls: list[Call] = [
        *({"part": "product", "kind": "bf16", "m": n, "k": n, "n": n} for n in squares),
        {"part": "product", "kind": "bf16", "m": best, "k": best, "n": best, "for_s": 0.1 if small else SUSTAINED_S},
        *({"part": "product", "kind": "bf16", "m": m, "k": k, "n": n} for m, k, n in shapes),
    ]
    for memory in ("pinned", "pageable"):
        for way in ("up", "down", "both"):
            calls += [{"part": "link", "way": way, "memory": memory, "bytes": size} for size in sizes]
    calls += [
        {"part": "launch", "what": what} for what in ("kernel", "product", "record", "wait", "record and wait", "copy")
    ]
    calls += [
        {"part": "pinning", "touched": touched, "bytes": size}
        for touched in (True, False)
        for size in ((4 * MIB,) if small else (64 * MIB, 1024 * MIB, 4096 * MIB))
    ]
    elements = MIB if small else 64 * MIB
    threads = sorted({min(cores, 2**power) for power in range(8)})
    calls += [{"part": "host memory", "threads": count, "elements": elements} for count in threads]
    calls += [{"part": "device memory", "bytes": size} for size in ((MIB,) if small else (64 * MIB, 1024 * MIB))]
    for kind in ("fp32", "tf32"):
        calls += [{"part": "product", "kind": kind, "m": n, "k": n, "n": n} for n in halves]
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device, budget = options.device, budget_of(options)
    recorded = Recorded("probe", options)
    calls = plan(small=options.small or device.type == "cpu", cores=len(os.sched_getaffinity(0)))
    calls = [call for call in calls if not options.only or call["part"] in options.only]
    with within(budget):
        for call in recorded.left(calls):
            if not budget.allows():
                break
            before_s = budget.left_s
            try:
                given = {name: value for name, value in call.items() if name != "part"}
                outcome = PARTS[call["part"]](device, options.least, **given)
            except (RuntimeError, ValueError, MemoryError) as error:
                outcome = {"error": error_of(error)}
                if "CUDA error" in outcome["error"]:  # the context is lost, and everything after would fail, too
                    raise
            recorded.add(call, outcome)
            budget.took(before_s - budget.left_s)
    found = [record for call in calls if (record := recorded.find(call))]
    for table in tables(found, str(device), name_of(device)):
        draw(table)
    for record in found:
        if "while" in record:
            say(f"meanwhile, {in_words(record['call'])}: {meanwhile.in_words(record['while'])}")
    for line in failures(found):
        say(line)
    if (best := best_product(recorded.records)) is not None:
        say(f"the best bf16 product: {best:.4g} TFLOP/s, which other tables take shares of")
    return end_of(recorded.left(calls), calls)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--least", type=float, default=0.1, metavar="S", help="seconds that each is timed for (0.1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return options


if __name__ == "__main__":
    sys.exit(main())
