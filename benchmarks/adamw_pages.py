"""What an update gains from states in private huge pages, beside the same states in memory that a forked child shares.

    python benchmarks/adamw_pages.py [--parameters 8Mi] [--rounds 24]

Three placements, in one thread, by its own clock on a processor, so that other work on the machine counts little. Each
round allocates all three anew, since what 4 KiB pages cost depends on where they happen to lie, and takes the median of
eight calls of each, in turns: all in shared memory, as everything was at first; moments and remainders in
private memory, which gets huge pages where the system grants them, as stores place them; and all of it private, which
weights and gradients cannot be, as children look at them. In fp32, split into bf16 and remainder, and with 8-bit
moments. Ratios are within a round. After each the placements are compared, bit by bit. Appends one JSON line
per placement and format to results/adamw.jsonl; a wrong result ends the run with exit code 1 and records nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from adamw import RESULTS, huge_page_bytes, parse_count, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stronghold import native
from stronghold.device import HostBuffer
from stronghold.lab.records.json_lines import append_record, describe_machine

PLACEMENTS = {"shared": (False, False), "states private": (False, True), "all private": (True, True)}
"""Whether (weight and gradient, moments and remainder) are private."""
FORMATS = ("fp32", "split", "8bit")
CALLS = 8


def segment_in(placement: str, kind: str, parameters: int) -> native.Segment:
    """Returns one tensor's update; each placement of a format has the same numbers."""
    generator = torch.Generator().manual_seed(0)
    user_private, own_private = PLACEMENTS[placement]

    def array(count: int, dtype: torch.dtype, *, private: bool) -> Tensor:
        return HostBuffer(count * dtype.itemsize, private=private).view(0, (count,), dtype)

    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    tensors: dict[str, Any] = {name: array(parameters, dtype, private=user_private) for name in ("weight", "grad")}
    tensors["weight"].normal_(0, 0.02, generator=generator)
    tensors["grad"].normal_(0, 1e-3, generator=generator)
    if kind != "fp32":
        tensors["remainder"] = array(parameters, torch.int16, private=own_private)
    for name in ("exp_avg", "exp_avg_sq"):
        if kind == "8bit":
            blocks = -(-parameters // native.BLOCK)
            codes, exponents = (array(count, torch.uint8, private=own_private) for count in (parameters, blocks))
            tensors[name] = native.Blocks(codes=codes, exponents=exponents)
        else:
            tensors[name] = array(parameters, torch.float32, private=own_private)
    return native.Segment(**tensors, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=100)


def results_of(segment: native.Segment) -> list[Tensor]:
    found = [segment.weight.view(torch.int32 if segment.remainder is None else torch.int16)]
    found += [] if segment.remainder is None else [segment.remainder]
    for moment in (segment.exp_avg, segment.exp_avg_sq):
        found += [moment.view(torch.int32)] if isinstance(moment, Tensor) else [moment.codes, moment.exponents]
    return found


def round_of(kind: str, parameters: int, first: int) -> tuple[dict[str, float], int]:
    """Returns the seconds of a call in each placement, and the bytes in huge pages. Exits with 1 on a wrong bit."""
    keys = [*list(PLACEMENTS)[first:], *list(PLACEMENTS)[:first]]
    segments = {placement: segment_in(placement, kind, parameters) for placement in keys}
    times_s: dict[str, list[float]] = {key: [] for key in keys}
    for number in range(-1, CALLS):  # once to touch the memory
        for key in keys:
            begin_s = time.thread_time()
            native.adamw([segments[key]], threads=1)
            if number >= 0:
                times_s[key].append(time.thread_time() - begin_s)
    expected = results_of(segments["shared"])
    for key in keys:
        if not all(map(torch.equal, results_of(segments[key]), expected)):
            sys.exit(f"WRONG: {kind} in the placement {key!r} has other bits\nNothing was recorded.")
    return {key: statistics.median(taken_s) for key, taken_s in times_s.items()}, huge_page_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=parse_count, default="8Mi", metavar="COUNT", help="of each tensor")
    parser.add_argument("--rounds", type=int, default=24, help="allocations of each placement")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="JSON lines to append to")
    arguments = parser.parse_args(argv)
    machine, records = describe_machine(), []
    table = Table(title=f"AdamW on {arguments.parameters:,} parameters, one thread, {arguments.rounds} rounds")
    for column in ("", "", "ns per parameter", "of the time in shared memory"):
        table.add_column(column)
    for kind in FORMATS:
        times_s: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
        for number in range(arguments.rounds):
            found_s, huge = round_of(kind, arguments.parameters, number % len(PLACEMENTS))
            for placement, one_s in found_s.items():
                times_s[placement].append(one_s)
        for placement, taken_s in times_s.items():
            ns = spread(1e9 * taken / arguments.parameters for taken in taken_s)
            ratio = spread(own / shared for own, shared in zip(taken_s, times_s["shared"], strict=True))
            settings = {name: getattr(arguments, name) for name in ("parameters", "rounds")} | {"threads": 1}
            record = {"benchmark": "adamw_pages", "contender": placement, "format": kind, "huge_page_bytes": huge}
            spreads = {"ns_per_parameter": vars(ns), "time_over_shared": vars(ratio)}
            records.append({**record, **spreads, **settings, "isa": native.best_isa(), **machine})
            table.add_row(kind, placement, ns.show("{:.3f}"), ratio.show("{:.2f}"))
    for record in records:
        append_record(arguments.out, record)
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
