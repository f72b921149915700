"""How fast the host's AdamW is, beside the memory that it runs on, torch's fused AdamW and DeepSpeed's CPU Adam.

    python benchmarks/adamw.py [--parameters 128Mi] [--threads 2] [--rounds 15] [--huge-pages] [--without-deepspeed]

Every round calls each contender once, in rotated order, and checks every call: a sample of its results is compared,
element by element, with AdamW in float64. The speed of a shared machine's memory changes from minute to minute, so only
the ratio of two calls of one round says anything; the tables show the medians and quartiles of these ratios. The bound
is a loop in C that reads four fp32 arrays, writes three and computes next to nothing, cut and scheduled as our kernels.

Appends one JSON line per contender to results/adamw.jsonl. A wrong result ends the run with WRONG and exit code 1 and
records nothing; a missed target is only said. DeepSpeed is measured where it is installed (pip install -e
'.[baselines]'); it compiles its kernel when it is first used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adamw_check import Check, Sample
from adamw_contenders import (
    FIRST_STEP,
    NAMES,
    Buffers,
    Contender,
    deepspeed_contenders,
    our_contenders,
    torch_contender,
)
from rich.console import Console
from rich.table import Table

from stronghold import native
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.units import format_bytes

RESULTS = Path(__file__).parent.parent / "results" / "adamw.jsonl"
PAUSE_S = 0.02  # OpenMP's idle threads spin for 10 ms behind a call: not into the next contender's time
SHORT = {
    "weight_ulp": "w",
    "weight_bf16_ulp": "w (bf16)",
    "exp_avg_ulp": "m",
    "exp_avg_sq_ulp": "v",
    "exp_avg_codes": "m (codes)",
    "exp_avg_sq_codes": "v (codes)",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What ``contender`` is to reach beside ``other``: at least ``limit`` of its bandwidth, or at most of its time."""

    contender: str
    other: str
    quantity: str  # "bandwidth" or "time"
    limit: float


TARGETS = (
    Target(contender="fp32", other="bound", quantity="bandwidth", limit=0.97),
    Target(contender="fp32", other="torch", quantity="time", limit=1.0),
    Target(contender="fp32", other="deepspeed", quantity="time", limit=1.0),
    Target(contender="split", other="bound", quantity="bandwidth", limit=0.95),
    Target(contender="split", other="deepspeed_offload", quantity="time", limit=0.93),
    Target(contender="split", other="deepspeed_offload_grad", quantity="time", limit=0.93),
    Target(contender="8bit", other="fp32", quantity="time", limit=1.0),
)


# ---- the measurement ----


class WrongResult(Exception):
    """A contender's result is not AdamW's."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of every contender, by key: seconds of each call, on the clock and summed over threads, and largest errors."""

    wall_s: dict[str, list[float]]
    processor_s: dict[str, list[float]]
    largest_error: dict[str, dict[str, float]]


def measure(contenders: Sequence[Contender], *, parameters: int, rounds: int, say: Callable[[str], None]) -> Measured:
    """Times ``rounds`` calls of each contender, after one that wakes the threads and is not counted.

    Raises WrongResult at the first call whose results are wrong.
    """
    sample = Sample(parameters)
    checks = {c.key: Check(c.state, sample, ours=c.ours) for c in contenders if c.state is not None}
    wall_s: dict[str, list[float]] = {contender.key: [] for contender in contenders}
    processor_s: dict[str, list[float]] = {contender.key: [] for contender in contenders}
    for number in range(rounds + 1):
        turn = number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            key, check, step = contender.key, checks.get(contender.key), FIRST_STEP + number
            say(f"round {number} of {rounds}: {contender.name}" if number else f"warming up: {contender.name}")
            if check:
                check.before()
            time.sleep(PAUSE_S)
            begin_s, begin_processor_s = time.perf_counter(), time.process_time()
            contender.run(step)
            end_s, end_processor_s = time.perf_counter(), time.process_time()
            if check and (wrong := check.after(step)):
                raise WrongResult(f"{contender.name}, step {step}: {'; '.join(wrong)}")
            if number:
                wall_s[key].append(end_s - begin_s)
                processor_s[key].append(end_processor_s - begin_processor_s)
    return Measured(
        wall_s=wall_s,
        processor_s=processor_s,
        largest_error={c.key: checks[c.key].largest if c.key in checks else {} for c in contenders},
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    def show(self, number: str) -> str:
        return f"{number.format(self.median)} ({number.format(self.low)} to {number.format(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.tensor(list(values), dtype=torch.float64).quantile(quartiles).tolist()
    return Spread(median=median, low=low, high=high)


def to_records(contenders: Sequence[Contender], measured: Measured, parameters: int) -> list[dict[str, Any]]:
    """Returns one record per contender; each ratio is of two calls of one round, and each spread over the rounds."""
    moved_bytes = {contender.key: contender.moved_bytes for contender in contenders}
    records = []
    for contender in contenders:
        key, wall_s = contender.key, measured.wall_s[contender.key]
        time_over = {
            other: [ours / theirs for ours, theirs in zip(wall_s, measured.wall_s[other], strict=True)]
            for other in moved_bytes
        }
        bandwidth_over = {
            other: [moved_bytes[key] / moved_bytes[other] / ratio for ratio in ratios]
            for other, ratios in time_over.items()
        }
        targets = []
        for target in TARGETS:
            if target.contender == key and target.other in moved_bytes:
                least = target.quantity == "bandwidth"
                found = spread((bandwidth_over if least else time_over)[target.other])
                met = found.median >= target.limit if least else found.median <= target.limit
                targets.append({**vars(target), "measured": vars(found), "met": met})
        records.append(
            {
                "benchmark": "adamw",
                "contender": key,
                "name": contender.name,
                "moved_bytes": contender.moved_bytes,
                "times_s": wall_s,
                "ns_per_parameter": vars(spread(1e9 * seconds / parameters for seconds in wall_s)),
                "gb_s": vars(spread(contender.moved_bytes * parameters / seconds / 1e9 for seconds in wall_s)),
                "of_bound": vars(spread(bandwidth_over["bound"])),
                "time_over": {other: vars(spread(ratios)) for other, ratios in time_over.items()},
                "cores": spread(
                    used / took for used, took in zip(measured.processor_s[key], wall_s, strict=True)
                ).median,
                "largest_error": measured.largest_error[key],
                "targets": targets,
            }
        )
    return records


def to_tables(records: Sequence[dict[str, Any]], title: str) -> list[Table]:
    speeds, goals = Table(title=title), Table(title="Targets")
    for column in ("", "ns per parameter", "moved", "GB/s", "of the bound", "cores", "largest error"):
        speeds.add_column(column, justify="left" if column in ("", "largest error") else "right")
    for column in ("", "target", "measured", ""):
        goals.add_column(column)
    for record in records:
        speeds.add_row(
            record["name"],
            Spread(**record["ns_per_parameter"]).show("{:.3f}"),
            f"{record['moved_bytes']:.4g} B",
            f"{record['gb_s']['median']:.1f}",
            Spread(**record["of_bound"]).show("{:.1%}") if record["contender"] != "bound" else "",
            f"{record['cores']:.2f}",
            "  ".join(f"{SHORT[name]} {error:.2g}" for name, error in record["largest_error"].items()),
        )
    results = {(t["contender"], t["other"], t["quantity"]): t for record in records for t in record["targets"]}
    for target in TARGETS:
        result = results.get((target.contender, target.other, target.quantity))
        goals.add_row(
            NAMES[target.contender],
            f"{'at least' if target.quantity == 'bandwidth' else 'at most'} {target.limit:.2f} of the "
            f"{target.quantity} of {NAMES[target.other]}",
            Spread(**result["measured"]).show("{:.3f}") if result else "",
            ("met" if result["met"] else "not met") if result else "not measured",
        )
    return [speeds, goals]


# ---- the command line ----


def parse_count(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|Ki|Mi|Gi)", text.strip())
    count = int(match[1]) * 1024 ** ("", "Ki", "Mi", "Gi").index(match[2]) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a count of 1 or more (got {text!r}); write 134217728 or 128Mi")
    return count


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, default: str, text: str) -> None:
        parser.add_argument(
            name, type=parse_count, default=default, metavar="COUNT", help=f"{text} (default: {default})"
        )

    add("--parameters", "128Mi", "parameters to update, as a number or in Ki, Mi, Gi; 38 bytes of memory each")
    add("--threads", "2", "threads of every contender")
    add("--rounds", "15", "timed calls of each contender; seven or more for a median that says something")
    parser.add_argument("--huge-pages", action="store_true", help="ask for huge pages for every contender's arrays")
    parser.add_argument("--without-deepspeed", action="store_true", help="leave DeepSpeed out though it is installed")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FILE", help=f"JSON lines to append to ({RESULTS})"
    )
    arguments = parser.parse_args(argv)
    needed_bytes, free_bytes = Buffers.needed_bytes(arguments.parameters), available_bytes()
    if free_bytes is not None and needed_bytes > 0.9 * free_bytes:
        parser.error(
            f"--parameters must leave a tenth of the free memory free (got {arguments.parameters:,}, which take "
            f"{format_bytes(needed_bytes)} of {format_bytes(free_bytes)}); pass at most {int(free_bytes * 0.9 / 39):,}"
        )
    if arguments.threads > native.usable_cores():
        parser.error(
            f"--threads must be at most the cores that can be used (got {arguments.threads} for "
            f"{native.usable_cores()} cores); pass fewer"
        )
    if arguments.out.is_dir():
        parser.error(f"--out must name a file (got the folder {arguments.out}); pass a file in it")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(width=max(Console().width, 155))
    torch.set_num_threads(arguments.threads)  # of DeepSpeed, too: its kernel runs on torch's OpenMP
    deepspeed = None
    try:
        with console.status("touching memory") as status, torch.no_grad():
            buffers = Buffers(arguments.parameters, huge_pages=arguments.huge_pages)
            contenders = [*our_contenders(buffers, arguments.threads), torch_contender(buffers)]
            if arguments.without_deepspeed:
                console.print("DeepSpeed: left out")
            elif importlib.util.find_spec("deepspeed") is None:
                console.print("DeepSpeed: not installed (pip install -e '.[baselines]' installs it)", markup=False)
            else:
                status.update("loading DeepSpeed's CPU Adam (its first use compiles it, for a minute or two)")
                try:
                    contenders += deepspeed_contenders(buffers)
                    deepspeed = importlib.metadata.version("deepspeed")
                except Exception as error:  # whatever ails its build must not keep us from measuring the rest
                    console.print(f"DeepSpeed: cannot be used ({error.__cause__ or error})", markup=False)
            measured = measure(contenders, parameters=arguments.parameters, rounds=arguments.rounds, say=status.update)
    except WrongResult as error:
        console.print(f"WRONG: {error}\nNothing was recorded.", style="bold red", soft_wrap=True, markup=False)
        return 1
    except OSError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted. What was measured is discarded; nothing was recorded.")
        return 130
    machine = describe_machine()
    machine["versions"]["deepspeed"] = deepspeed
    settings = {
        "parameters": arguments.parameters,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "isa": native.best_isa(),
        "huge_pages": arguments.huge_pages,
        "huge_page_bytes": huge_page_bytes(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    records = to_records(contenders, measured, arguments.parameters)
    for record in records:
        append_record(arguments.out, {**record, **settings, **machine})
    title = f"AdamW on {arguments.parameters:,} parameters with {arguments.threads} threads, {arguments.rounds} rounds"
    for table in to_tables(records, title):
        console.print(table)
    console.print(
        "Medians and quartiles; ratios are of two calls of one round. Errors: largest distance from float64, in ulp or "
        f"codes, of w weight, m and v moments.\nPeak memory {format_bytes(settings['peak_bytes'])}, on huge pages "
        f"{format_bytes(settings['huge_page_bytes'])}. Recorded in {arguments.out}.",
        markup=False,
        soft_wrap=True,
    )
    return 0


def available_bytes() -> int | None:
    """Returns the memory that can be used without swapping, None where the system does not tell."""
    return _kernel_bytes("/proc/meminfo").get("MemAvailable")


def huge_page_bytes() -> int:
    """Returns how much of this process's memory lies on huge pages; 0 where the system does not tell."""
    counted = _kernel_bytes("/proc/self/smaps_rollup")
    return sum(counted.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped"))


def _kernel_bytes(path: str) -> dict[str, int]:
    try:
        text = Path(path).read_text()
    except OSError:
        return {}
    return {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


if __name__ == "__main__":
    sys.exit(main())
