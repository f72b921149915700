"""Every method on the same model, in turn: samples per second and memory a parameter.

    python benchmarks/methods.py [--layers 14] [--hidden 512] [--dtype fp32] [--rounds 5] [--steps 5] [--only NAME]...

Each call is a process that trains the reference GPT for some steps through stronghold's one loop (`stronghold train
--method ...`), all with the same seed, data, precision and recomputation, without clipping. Every round calls each
contender once, in rotated order, so that a ratio is of two calls of one round; the table has medians and quartiles. The
memory is the process's peak, without what the same method takes for a model of next to nothing (once, before the
rounds). A contender whose losses are not those of the ordinary loop, by stronghold.lab.records.agreement, is WRONG.
Appends one JSON line for each contender to results/methods.jsonl. DeepSpeed's contenders need the extra
``baselines``; one that fails is a line that says so.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calls import spread, train
from rich.console import Console
from rich.table import Table

from stronghold.lab.records.agreement import disagreements
from stronghold.lab.records.json_lines import Record, append_record, describe_machine
from stronghold.units import format_bytes, format_count

RESULTS = Path(__file__).parent.parent / "results" / "methods.jsonl"
ORDINARY = "ordinary loop"
CONTENDERS = {
    ORDINARY: ["megatron-lm"],
    "stronghold": ["stronghold"],
    "stronghold, in_backward": ["stronghold", "--update", "in_backward"],
    "stronghold, disk": ["stronghold", "--store", "disk"],
    "zero-offload": ["zero-offload"],
    "zero-infinity": ["zero-infinity"],
    "zero-infinity-nvme": ["zero-infinity-nvme", "--store", "disk"],
}
SMALLEST = ["--layers", "2", "--hidden", "32", "--vocabulary", "512"]


def run(name: str, options: argparse.Namespace, shape: Sequence[str]) -> Record | str:
    """Returns the record of one call, or why it failed."""
    method, *own = CONTENDERS[name]
    words = ["--method", method, *own, *shape, "--batch", str(options.batch), "--seq", str(options.seq)]
    words += ["--steps", str(options.steps), "--dtype", options.dtype]
    words += ["--window", "1" if shape is SMALLEST else str(options.window)]
    call = train([*words, "--clip", "0", "--lr", "1e-4", "--device", "cpu"], scratch=options.scratch)
    return call.reason if call.record is None else call.record


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Returns one record for each contender."""
    names = [name for name in CONTENDERS if name == ORDINARY or not options.only or name in options.only]
    shape = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
    failed: dict[str, str] = {}
    bare: dict[str, int] = {}
    found: dict[str, list[Record]] = {name: [] for name in names}
    for number in range(-1, options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in failed:
                continue
            console.print(f"round {number + 1} of {options.rounds}: {name}", highlight=False)
            record = run(name, options, SMALLEST if number < 0 else shape)
            if isinstance(record, str):
                failed[name] = record
            elif number < 0:
                bare[name] = record["summary"]["peak_host_bytes"]
            else:
                found[name].append(record)
    if ORDINARY in failed:
        raise SystemExit(f"every contender is compared with the {ORDINARY}, which failed: {failed[ORDINARY]}")
    reference = found[ORDINARY]
    results = []
    for name in names:
        base = {"benchmark": "methods", "contender": name, "settings": vars(options) | {"scratch": None, "out": None}}
        if name in failed:
            results.append({**base, "error": failed[name]})
            continue
        rates = [record["summary"]["samples_per_s"] for record in found[name]]
        ordinary = [record["summary"]["samples_per_s"] for record in reference]
        wrong = disagreements([reference[0], found[name][0]])[1]
        beyond = max(record["summary"]["peak_host_bytes"] for record in found[name]) - bare[name]
        results.append(
            {
                **base,
                "parameters": found[name][0]["parameters"],
                "samples_s": rates,
                "rate": spread(rates),
                "over_ordinary": spread(one / other for one, other in zip(rates, ordinary, strict=True)),
                "bare_bytes": bare[name],
                "bytes_beyond": beyond,
                "bytes_a_parameter": beyond / found[name][0]["parameters"],
                "losses": found[name][0]["losses"],
                "wrong": str(wrong) if wrong is not None else "",
            }
        )
    return results


def to_table(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    parameters = next((result["parameters"] for result in results if "parameters" in result), 0)
    title = f"{format_count(parameters)} parameters, {options.dtype}, {options.batch} x {options.seq} tokens"
    table = Table(title=title)
    for column in ("", "samples/s", "of the ordinary loop's", "beyond the bare process", "bytes per parameter", ""):
        table.add_column(column, justify="left" if not column else "right")
    for result in results:
        if "error" in result:
            table.add_row(result["contender"], "", "", "", "", f"failed: {result['error']}")
            continue
        rate, over = result["rate"], result["over_ordinary"]
        table.add_row(
            result["contender"],
            f"{rate['median']:.3f}",
            f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})",
            format_bytes(result["bytes_beyond"]),
            f"{result['bytes_a_parameter']:.1f}",
            f"WRONG: {result['wrong']}" if result["wrong"] else "",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14, help="(14)")
    parser.add_argument("--hidden", type=int, default=512, help="(512: 70 M parameters with 14 layers)")
    parser.add_argument("--batch", type=int, default=4, help="(4)")
    parser.add_argument("--seq", type=int, default=128, help="(128)")
    parser.add_argument("--window", default="auto", help="stronghold's (auto)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(fp32)")
    parser.add_argument("--steps", type=int, default=5, help="of a call (5)")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each contender (5)")
    parser.add_argument("--only", action="append", choices=tuple(CONTENDERS), help="repeatable (all)")
    parser.add_argument("--scratch", metavar="DIR", help="where stores on disk lie (the system's temporary folder)")
    parser.add_argument("--out", default=str(RESULTS), metavar="FILE", help="JSON lines to append to (%(default)s)")
    options = parser.parse_args(arguments)
    console = Console(width=150)
    results = measure(options, console)
    machine = describe_machine()
    for result in results:
        append_record(options.out, {**result, **machine})
    console.print(to_table(results, options))
    return 1 if any(result.get("wrong") for result in results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the call ends, too
    sys.exit(main())
