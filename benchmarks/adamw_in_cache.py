"""How fast the host's AdamW computes where memory is no limit, beside torch's fused AdamW, on one thread.

    python benchmarks/adamw_in_cache.py [--rounds 60]

Each round times, in rotated order, calls on 2 Ki and on 24 Ki parameters, which stay in a core's second cache; the
difference of the two is what the parameters between take, without what a call takes. Every instruction set of this
processor, with fp32 weights, with bf16 weights and remainders, and with 8-bit moments, too. The last call of each is
compared, element by element, with AdamW in float64. Appends one JSON line per contender to results/adamw.jsonl; a wrong
result ends the run with exit code 1 and records nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adamw import RESULTS, spread
from adamw_check import BETA1, BETA2, EPS, LR, WEIGHT_DECAY, Check, Sample, State
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stronghold import native
from stronghold.lab.records.json_lines import append_record, describe_machine

FEW, MANY = 2 * 1024, 24 * 1024
STEP = 100
CALLS = 20  # timed together: one takes a few microseconds
STAGGER = 528  # floats: arrays whose distance is a power of two push one another out of the nearest cache


@dataclass(frozen=True, kw_only=True)
class Call:
    """One update of ``state``; ``run`` takes it again and again with the same gradient and step."""

    state: State
    run: Callable[[], object]


def arrays(parameters: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = {"weight": 0.02, "grad": 1e-3, "exp_avg": 1e-4, "exp_avg_sq": 1e-3}
    found = {}
    for number, (name, scale) in enumerate(scales.items()):
        begin = 16 + number * STAGGER
        found[name] = torch.zeros(begin + parameters)[begin:].normal_(std=scale, generator=generator)
    found["exp_avg_sq"].square_()
    return found


def torch_call(parameters: int) -> Call:
    """Returns a call of the operator that torch's fused AdamW calls once for each parameter: without its Python."""
    s, step = State(**arrays(parameters)), [torch.tensor(float(STEP))]
    settings: dict[str, Any] = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": WEIGHT_DECAY}

    def run() -> None:
        torch._fused_adamw_(
            [s.weight], [s.grad], [s.exp_avg], [s.exp_avg_sq], [], step, amsgrad=False, maximize=False, **settings
        )

    return Call(state=s, run=run)


def our_call(parameters: int, isa: str, kind: str) -> Call:
    tensors: dict[str, Any] = arrays(parameters)
    if kind != "fp32":
        for name in ("weight", "grad"):
            tensors[name] = tensors[name].bfloat16()
        tensors["remainder"] = torch.zeros(parameters, dtype=torch.int16)
    if kind == "8bit":
        for name in ("exp_avg", "exp_avg_sq"):
            blocks = -(-parameters // native.BLOCK)
            codes, exponents = (torch.zeros(count, dtype=torch.uint8) for count in (parameters, blocks))
            tensors[name] = native.Blocks(codes=codes, exponents=exponents)
    segment = native.Segment(**tensors, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, step=STEP)
    return Call(state=State(**tensors), run=lambda: native.adamw([segment], threads=1, isa=isa))


def seconds_of(call: Call) -> float:
    call.run()  # brings the arrays into the cache
    begin_s = time.perf_counter()
    for _ in range(CALLS):
        call.run()
    return (time.perf_counter() - begin_s) / CALLS


def wrong_in(call: Call, parameters: int, *, ours: bool) -> list[str]:
    """Returns what is wrong with one more call."""
    check = Check(call.state, Sample(parameters), ours=ours)
    check.before()
    call.run()
    return check.after(STEP)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="timings of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="JSON lines to append to")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    calls = {"torch": [torch_call(n) for n in (FEW, MANY)]}
    for isa in native.available_isas():
        for kind in ("fp32", "split", "8bit"):
            calls[f"{isa} {kind}"] = [our_call(n, isa, kind) for n in (FEW, MANY)]
    keys = list(calls)
    ns: dict[str, list[float]] = {key: [] for key in keys}
    for number in range(arguments.rounds):
        turn = number % len(keys)
        for key in [*keys[turn:], *keys[:turn]]:
            few, many = (seconds_of(call) for call in calls[key])
            ns[key].append(1e9 * (many - few) / (MANY - FEW))
    for key in keys:
        if wrong := wrong_in(calls[key][1], MANY, ours=key != "torch"):
            print(f"WRONG: {key}: {'; '.join(wrong)}\nNothing was recorded.")
            return 1
    machine, table = describe_machine(), Table(title=f"AdamW in a core's cache, {arguments.rounds} rounds")
    for column in ("", "ns per parameter", "of torch's time"):
        table.add_column(column)
    for key in keys:
        ratio = spread(ours / theirs for ours, theirs in zip(ns[key], ns["torch"], strict=True))
        record = {
            "benchmark": "adamw_in_cache",
            "contender": key,
            "ns_per_parameter": vars(spread(ns[key])),
            "least_ns_per_parameter": min(ns[key]),
            "time_over_torch": vars(ratio),
            "parameters": [FEW, MANY],
            "threads": 1,
            "rounds": arguments.rounds,
            **machine,
        }
        append_record(arguments.out, record)
        table.add_row(key, spread(ns[key]).show("{:.3f}"), ratio.show("{:.2f}"))
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
