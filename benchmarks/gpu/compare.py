"""Every method on a machine with a GPU: under caps of device memory, through windows, over layers, and at its largest.

    python benchmarks/gpu/compare.py --part methods [--caps 16GiB 8GiB 24GiB 32GiB] [--batches 32 4]
    python benchmarks/gpu/compare.py --part windows [--windows 2 3 ... 15]
    python benchmarks/gpu/compare.py --part layers [--layers 16 24 ... 92]
    python benchmarks/gpu/compare.py --part largest [--only stronghold]
    python benchmarks/gpu/compare.py --part methods --small      # any part on the CPU, with a tiny model, to try it out

Each call is a process that trains the reference GPT (1.717 B parameters, bf16) through stronghold's one loop, all with
the same seed, data and recomputation, without clipping. A cap is the most that PyTorch may take of the GPU there
(`--device-limit`); the resident run, which all are compared with, has none. Under a cap stronghold fills with resident
layers and a window what activations leave (--reserve, --activations and --micro-batch are chosen by the cap); where a
cap is too small for DeepSpeed it accumulates the gradients of parts of the batch. Every round begins with the resident
run, and a ratio is of two calls of one round; the table has medians and quartiles. Losses that are not the resident
run's, by stronghold.lab.records.agreement, are WRONG. A method that fails is a line that says so.

No call begins that would not end within --minutes by the longest so far. What is left is said, and the same command
goes on with it: calls that --out has already, of this machine and commit, are not made again (--again). The largest
models are those of the evaluation's case 1, --machine h200, whose trials go to trials.jsonl beside --out.

DeepSpeed is measured where it is installed. Without a network it comes from a folder of wheels, --wheels DIR:

    pip wheel --no-deps -r requirements-baselines.txt -w DIR   # elsewhere, and of what they need that is lacking there
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for calls.py

from calls import Budget, train
from compare_parts import DEEPSPEED, UPDATES, Course, Round, Setting, Wanted, command, fit, plan
from compare_runs import OutOfTime, Runner, Say
from compare_table import goals, notes, rows, table
from rich.console import Console

from stronghold.lab.cases.case import CASES
from stronghold.lab.cases.largest import find_largest
from stronghold.lab.cases.machines import H200, TINY
from stronghold.lab.cases.points import show
from stronghold.lab.cases.reading import read_results
from stronghold.lab.cases.running import Place
from stronghold.lab.cases.table import tables
from stronghold.lab.methods import METHODS
from stronghold.lab.records.agreement import disagreements
from stronghold.units import format_seconds, parse_bytes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "gpu" / "methods.jsonl"
LARGEST = "largest"
PARTS = {
    "methods": Wanted(batches=(32, 4), caps=tuple(map(parse_bytes, ("16GiB", "8GiB", "24GiB", "32GiB")))),
    "windows": Wanted(windows=tuple(range(2, 16))),
    "layers": Wanted(
        layers=H200.scaling_layers, caps=(H200.device_limit,), windows=(H200.window,), updates=UPDATES[:1], rounds=1
    ),
}
SMALL = {
    "methods": Wanted(layers=(4,), batches=(2, 4), caps=(parse_bytes("1MiB"), parse_bytes("2MiB"))),
    "windows": Wanted(layers=(4,), batches=(2,), windows=(1, 2, 3)),
    "layers": Wanted(layers=(2, 3), batches=(2,), windows=(1,), updates=UPDATES[:1], rounds=1),
}
SMALL_COURSE = Course(hidden=64, heads=2, vocabulary=512, sequence=32, steps=5, lr=1e-3, device="cpu", reserve=0)
PREPARED = Setting(part="none", method="zero-offload", layers=2, batch=1)
"""What has DeepSpeed compile its operators before anything is timed."""
PREPARING_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=400)  # no line of a table is cut or broken

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    adopt("stronghold_exports", ("GOMP_SPINCOUNT",))
    budget = Budget(60 * options.minutes)
    if options.part == LARGEST:
        largest(options, budget, say, console)
        return 0
    course, wanted = chosen(options)
    runner = Runner(
        options.part,
        course,
        out=options.out,
        budget=budget,
        timeout_s=options.timeout or 180.0,
        say=say,
        commit=options.commit,
        again=options.again,
        keep=options.trace,
        scratch=options.scratch,
    )
    rounds = list(plan(options.part, wanted))
    if not options.table:
        measure(runner, rounds, budget, options.wheels, say)
    found = rows(runner.records)
    if not found:
        say(f"{options.out} has nothing of this part, machine and commit")
        return 0
    console.print(table(found))
    for line in (*notes(found), *map(str, goals(found))):
        say(line)
    return 1 if any(row.wrong for row in found) else 0


def measure(runner: Runner, rounds: Sequence[Round], budget: Budget, wheels: Path | None, say: Say) -> None:
    """Makes the calls that are left, and says how many are then."""

    def count() -> int:
        return sum(len(one.settings) for one in runner.left(rounds))

    @cache
    def prepare(method: str) -> str:
        if method not in DEEPSPEED:
            return ""
        if method != DEEPSPEED[0] and (reason := prepare(DEEPSPEED[0])):
            return reason
        use_baselines(wheels, say)
        course, setting = replace(SMALL_COURSE, device=runner.course.device), replace(PREPARED, method=method)
        call = train(command(course, setting, fit(course, setting)), timeout_s=min(PREPARING_S, budget.left_s))
        say(f"{method} is {call.reason or 'ready'} ({format_seconds(call.wall_s)})")
        return call.reason

    say(f"{count()} of {sum(len(one.settings) for one in rounds)} calls to make, beside the resident runs")
    try:
        runner.run(rounds, prepare)
    except OutOfTime:
        say(f"the time is up: {count()} calls are left, and the same command goes on with them")


def use_baselines(wheels: Path | None, say: Say) -> None:
    """Installs DeepSpeed from ``wheels`` if it is absent, and has what it compiles kept in the tree."""
    if wheels is None and importlib.util.find_spec("deepspeed") is None:
        return  # its methods say so
    offline = {} if wheels is None else {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels.resolve())}
    if not adopt("stronghold_baselines deepspeed ninja", ("PATH", "TORCH_EXTENSIONS_DIR"), offline):
        say(f"DeepSpeed could not be installed from {wheels} (see above)")


def adopt(function: str, names: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Calls a function of environment.sh, and takes variables from it for the calls. Returns whether it worked."""
    script = f'. "$1" && PYTHON="$2" && {function} && env -0'
    command = ["bash", "-c", script, "bash", str(ROOT / "environment.sh"), sys.executable]
    whole = os.environ | (environment or {})
    done = subprocess.run(command, env=whole, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    found = dict(line.partition("=")[::2] for line in done.stdout.decode().split("\0"))
    os.environ.update({name: found[name] for name in names if name in found})
    return done.returncode == 0


def largest(options: argparse.Namespace, budget: Budget, say: Say, console: Console) -> None:
    """Searches for the largest model of each method, and draws the table of case 1."""
    preset = TINY if options.small else H200
    preset = replace(preset, methods=tuple(options.only or preset.methods))
    place = Place(
        results=options.out.parent,
        device=options.device or ("cpu" if options.small else "cuda"),
        again=options.again,
        timeout_s=options.timeout or 300.0,
    )
    left_s: list[float] = []

    def before_trial() -> None:
        if left_s:
            budget.took(left_s.pop() - budget.left_s)
        if not budget.allows(times_longest=2.0):  # the next model may be twice as large
            raise OutOfTime
        left_s.append(budget.left_s)

    if not options.table:
        if any(method in DEEPSPEED for method in preset.methods):
            use_baselines(options.wheels, say)
        try:
            find_largest(CASES[1], preset, place, say, before_trial=before_trial)
        except OutOfTime:
            say("the time is up: the same command goes on with the search")
    results = read_results([place.results], disagreements).measurements if place.results.exists() else ()
    try:
        shown = show(CASES[1], preset, results)
    except ValueError as error:  # of several machines
        say(f"no table: {error}")
        return
    for drawn in tables(shown):
        console.print(drawn)
    for note in shown.notes:
        say(f"note: {note}")


def chosen(options: argparse.Namespace) -> tuple[Course, Wanted]:
    """Returns what all calls have in common and what the part goes over, as told and otherwise by default."""

    def told(kind: type) -> dict[str, Any]:
        found = {item.name: getattr(options, item.name) for item in fields(kind)}
        return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if v is not None}

    course = SMALL_COURSE if options.small else Course()
    wanted = (SMALL if options.small else PARTS)[options.part]
    return replace(course, **told(Course)), replace(wanted, **told(Wanted))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", choices=(*PARTS, LARGEST), required=True, help="what is measured")
    add("--small", action="store_true", help="a tiny model on the CPU, to try it out")
    add("--caps", type=parse_bytes, nargs="+", metavar="SIZE", help="of device memory")
    add("--batches", type=int, nargs="+", metavar="N", help="samples in a step")
    add("--layers", type=int, nargs="+", metavar="N", help="of the models (32; of the part layers 16 to 92)")
    add("--windows", type=int, nargs="+", metavar="N", help="of the parts windows (2 to 15) and layers (15)")
    add("--updates", nargs="+", choices=UPDATES, help="stronghold's")
    add("--only", nargs="+", choices=tuple(METHODS), metavar="METHOD", help="of the parts methods and largest")
    add("--rounds", type=int, metavar="N", help="(2; of the part layers 1)")
    for name, kind, about in (
        ("hidden", int, "width of a layer (2048)"),
        ("heads", int, "(16)"),
        ("vocabulary", int, "(51200)"),
        ("seq", int, "tokens in a sample (1024)"),
        ("steps", int, "of a call, of which the first two are not counted (8)"),
        ("lr", float, "(3e-6)"),
    ):
        add(f"--{name}", type=kind, dest="sequence" if name == "seq" else name, metavar="N", help=about)
    add("--dtype", choices=("fp32", "bf16"), help="(bf16)")
    add("--device", help="cpu, cuda, cuda:N or an accelerator that torch sees (cuda)")
    add("--states", choices=("fp32", "8bit"), help="stronghold's moments (fp32)")
    add("--activations", choices=("recompute", "keep", "host"), help="stronghold's (by the cap)")
    add("--micro-batch", type=int, metavar="N", help="stronghold's (by the cap)")
    add("--reserve", type=parse_bytes, metavar="SIZE", help="of a cap, for stronghold's activations (by their size)")
    add("--minutes", type=float, default=9.5, metavar="N", help="that this may take (9.5)")
    add("--timeout", type=float, metavar="S", help="seconds that a call may take (180), or a trial of largest (300)")
    add("--again", action="store_true", help="also what is recorded already, of this machine and commit")
    add("--table", action="store_true", help="only draw what is recorded, of this machine and commit")
    add("--trace", type=Path, metavar="DIR", help="where each setting's timeline goes, and what a failed call has said")
    add("--scratch", metavar="DIR", help="where calls write meanwhile (the system's temporary folder)")
    add("--wheels", type=Path, metavar="DIR", help="what DeepSpeed is installed from where it is absent")
    add("--commit", metavar="NAME", help="to record where this tree is no checkout (git's)")
    add("--out", type=Path, default=RESULTS, metavar="FILE", help="JSON lines to append to (results/gpu/methods.jsonl)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the call ends, too
    sys.exit(main())
