"""The largest model that trains under a limit of host memory: by stronghold from disk, by PyTorch, by DeepSpeed.

    python benchmarks/largest.py --method stronghold --layers 100 --store /mnt/nvme/largest      # one trial
    python benchmarks/largest.py --method pytorch --limit 8GiB                                   # searches
    python benchmarks/largest.py --method zero-infinity --store /mnt/nvme/largest
    python benchmarks/largest.py --table                                                         # draws the records

Each trial is a process that trains the reference GPT of so many layers on the source of Python's standard library:
three steps of one sequence of 64 tokens. It passes if its losses are finite, the last is below the first, and its peak
resident memory (VmHWM, of its children too) is within the limit; it is killed as soon as it is over the limit, over the
disk's (--disk) or over its time (--timeout). Without --layers their number doubles until a trial fails, and the largest
that passes is found by bisection. The system's cache of files is in nobody's resident memory, and not counted.

Appends one JSON line per trial to results/largest.jsonl, and draws a table of them. DeepSpeed needs the extra
``baselines`` and libaio's headers (Debian: libaio-dev); it compiles its operators before the first trial.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stronghold.lab.records.json_lines import Record, append_record, describe_machine, read_records
from stronghold.lab.records.trials import Limits, end, exit_reason, search, watch
from stronghold.units import format_bytes, format_count, format_seconds, parse_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "largest.jsonl"
TRIAL = Path(__file__).parent / "largest_trial.py"
METHODS = ("stronghold", "pytorch", "zero-infinity", "zero-offload")
MMAP_THRESHOLD_BYTES = 65536
SHAPE = ("hidden", "heads", "vocabulary", "sequence")
"""What trials of one table have in common, besides the limit."""


# ---- one trial ----


def command(options: argparse.Namespace, layers: int, scratch: Path) -> list[str]:
    """Returns what trains ``layers`` layers, logs to ``scratch``/log.jsonl and stores under ``scratch``."""
    model = ["--layers", layers, "--hidden", options.hidden, "--heads", options.heads]
    model += ["--vocabulary", options.vocabulary, "--steps", options.steps, "--lr", options.lr]
    if options.method == "stronghold":
        placed = ["--store", scratch / "store", "--window", options.window, "--update", "in_backward"]
        placed += ["--device", "cpu", "--dtype", options.dtype, "--states", options.states, "--out", scratch]
        return [sys.executable, "-m", "stronghold", "train", "--batch", "1", "--seq", str(options.sequence)] + [
            str(word) for word in model + placed
        ]
    own = ["--sequence", options.sequence, "--dtype", options.dtype, "--store", scratch / "store"]
    own += ["--log", scratch / "log.jsonl"]
    return [sys.executable, str(TRIAL), options.method, *(str(word) for word in model + own)]


def attempt(options: argparse.Namespace, layers: int) -> Record:
    """Runs one trial and returns its record; ``reason`` is empty if it passed."""
    Path(options.store).mkdir(parents=True, exist_ok=True)
    limits = Limits(memory_bytes=options.limit, disk_bytes=options.disk, time_s=options.timeout)
    with tempfile.TemporaryDirectory(dir=options.store, prefix="largest-") as folder:
        scratch = Path(folder)
        with (scratch / "output").open("wb") as output:
            process = subprocess.Popen(
                command(options, layers, scratch),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(options.method),
            )
            try:
                watched = watch(process, limits, scratch)
            finally:
                end(process)
        lines = read_records(scratch / "log.jsonl").records if (scratch / "log.jsonl").exists() else ()
        said = (scratch / "output").read_text(errors="replace")
    steps = [line for line in lines if line["event"] == "step"]
    losses = [step["loss"] for step in steps]
    peak = max([watched.peak_bytes, *(step["peak_host_bytes"] for step in steps)])
    ended = watched.reason or exit_reason(process.returncode, said)
    return {
        "benchmark": "largest",
        "method": options.method,
        "settings": settings_of(options),
        "layers": layers,
        "parameters": next((line["parameters"] for line in lines if line["event"] == "start"), None),
        "losses": losses,
        "seconds": [round(step["iteration_s"], 3) for step in steps],
        "peak_bytes": peak,
        "disk_bytes": watched.disk_bytes,
        "trial_s": round(watched.trial_s, 1),
        "reason": ended or verdict(losses, options.steps, peak, options.limit),
    }


def verdict(losses: Sequence[Any], steps: int, peak: int, limit: int) -> str:
    """Returns what a trial that ended by itself lacks, nothing if it passed."""
    if len(losses) != steps:
        return f"took {len(losses)} steps of {steps}"
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        return "the loss is not finite"
    if losses[-1] >= losses[0]:
        return "the loss does not fall"
    return "over the limit of memory" if peak > limit else ""


def environment(method: str) -> dict[str, str]:
    """Returns the environment of a trial.

    PyTorch and DeepSpeed free and allocate large tensors again and again: glibc's heap keeps them, by the gigabyte,
    unless it is told to give each its own pages. stronghold runs as it is.
    """
    found = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    if method != "stronghold":
        found["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    return os.environ | found


def machine(method: str) -> Record:
    described = describe_machine()
    if method.startswith("zero"):
        described["versions"]["deepspeed"] = importlib.metadata.version("deepspeed")
    return described


def settings_of(options: argparse.Namespace) -> Record:
    names = ("limit", *SHAPE, "steps", "lr", "dtype") + (("window", "states") if options.method == "stronghold" else ())
    found = {name: getattr(options, name) for name in names}
    return found if options.method == "stronghold" else found | {"mmap_threshold_bytes": MMAP_THRESHOLD_BYTES}


# ---- the table ----


def table(records: Iterable[Record], options: argparse.Namespace) -> Table:
    """Returns a row per method and settings: the largest that passed, and the smallest above it that did not."""
    rows: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        settings = record["settings"]
        if all(settings[name] == getattr(options, name) for name in ("limit", *SHAPE)):
            kind = [settings["dtype"]] if record["method"] in ("stronghold", "pytorch") else ["bf16"]
            if record["method"] == "stronghold":
                kind += [f"window {settings['window']}", f"{settings['states']} states"]
            rows.setdefault((record["method"], ", ".join(kind)), []).append(record)
    drawn = Table(title=f"The largest model under {format_bytes(options.limit)} of memory, hidden {options.hidden}")
    for name in ("method", "", "layers", "parameters", "peak memory", "B a parameter", "on disk", "a step", "next"):
        drawn.add_column(name, justify="left" if name in ("method", "", "next") else "right")
    for (method, kind), trials in rows.items():
        drawn.add_row(method, kind, *cells(trials))
    return drawn


def cells(trials: Sequence[Record]) -> list[str]:
    passed = [trial for trial in trials if not trial["reason"]]
    if not passed:
        return ["none", "", "", "", "", "", min(trials, key=lambda trial: trial["layers"])["reason"]]
    best = max(passed, key=lambda trial: trial["layers"])
    failed = [trial for trial in trials if trial["reason"] and trial["layers"] > best["layers"]]
    following = min(failed, key=lambda trial: trial["layers"], default=None)
    slope = bytes_per_parameter(passed)
    return [
        str(best["layers"]),
        format_count(best["parameters"]),
        format_bytes(best["peak_bytes"]),
        "" if slope is None else f"{slope:.2f}",
        format_bytes(best["disk_bytes"]),
        format_seconds(sorted(best["seconds"])[len(best["seconds"]) // 2]),
        f"{following['layers']}: {following['reason']}" if following else "not tried",
    ]


def bytes_per_parameter(passed: Sequence[Record]) -> float | None:
    """Returns what the peak grows by from the smallest to the largest trial, in bytes per parameter more."""
    small, large = (pick(passed, key=lambda trial: trial["layers"]) for pick in (min, max))
    more = large["parameters"] - small["parameters"]
    return (large["peak_bytes"] - small["peak_bytes"]) / more if more else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the trial ends, too, and its files go
    console = Console(width=150)
    if not options.table:
        run(options, console)
    records = read_records(options.out).records
    console.print(table(records, options))
    return 0


def run(options: argparse.Namespace, console: Console) -> None:
    def passes(layers: int) -> bool:
        record = attempt(options, layers)
        append_record(options.out, record | machine(options.method))
        peak, disk = format_bytes(record["peak_bytes"]), format_bytes(record["disk_bytes"])
        console.print(
            f"{options.method}, {layers} layers: {record['reason'] or 'passed'}; peak {peak}, on disk {disk}, losses "
            + (" ".join(f"{loss:.4f}" for loss in record["losses"] if isinstance(loss, float)) or "none"),
            soft_wrap=True,
        )
        sys.stdout.flush()
        return not record["reason"]

    if options.method.startswith("zero"):
        prepare = [sys.executable, str(TRIAL), options.method, "--prepare"]
        subprocess.run(prepare, check=True, env=environment(options.method), stdout=subprocess.DEVNULL)
    if options.layers is not None:
        passes(options.layers)
    else:
        search(passes, options.first, options.most)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", choices=METHODS, help="what trains")
    add("--table", action="store_true", help="only draw the table of the records")
    add("--limit", type=parse_bytes, default="8GiB", metavar="SIZE", help="of resident memory (default: 8GiB)")
    add("--disk", type=parse_bytes, metavar="SIZE", help="what a trial may store (default: what is free but 4 GiB)")
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds that a trial may take (default: 3600)")
    add("--store", default=tempfile.gettempdir(), metavar="DIR", help="where trials store, each in a new folder of it")
    add("--out", type=Path, default=RESULTS, metavar="FILE", help="records (default: results/largest.jsonl)")
    add("--layers", type=int, metavar="N", help="one trial of so many layers, and no search")
    add("--first", type=int, default=1, metavar="N", help="layers that the search begins with (default: 1)")
    add("--most", type=int, default=1024, metavar="N", help="layers that it ends with (default: 1024)")
    add("--hidden", type=int, default=2048, metavar="N", help="width of a layer (default: 2048)")
    add("--heads", type=int, default=16, metavar="N", help="attention heads (default: 16)")
    add("--vocabulary", type=int, default=51200, metavar="N", help="token ids (default: 51200)")
    add("--sequence", type=int, default=64, metavar="N", help="tokens in a step (default: 64)")
    add("--steps", type=int, default=3, metavar="N", help="steps (default: 3)")
    add("--lr", type=float, default=3e-5, metavar="X", help="learning rate, without a warm-up (default: 3e-5)")
    add("--dtype", choices=("fp32", "bf16"), help="of stronghold's computing (default: bf16), of all of pytorch (fp32)")
    add("--window", type=int, default=2, metavar="N", help="stronghold's layers at a time (default: 2)")
    add("--states", choices=("fp32", "8bit"), default="fp32", help="stronghold's moments (default: fp32)")
    options = parser.parse_args(arguments)
    if options.method is None and not options.table:
        parser.error("pass --method, or --table for the records alone")
    if options.dtype is None:
        options.dtype = "fp32" if options.method == "pytorch" else "bf16"
    if options.disk is None:
        parent = next(path for path in (Path(options.store), *Path(options.store).absolute().parents) if path.exists())
        options.disk = max(0, shutil.disk_usage(parent).free - 4 * 2**30)
    return options


if __name__ == "__main__":
    sys.exit(main())
