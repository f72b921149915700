"""What the scripts of this folder have in common: their options, and the records that a second call goes on from."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # for calls.py

from calls import Budget

from stronghold.lab.records.json_lines import Record, append_record, describe_machine, read_records, to_line

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "gpu"
SOURCES = ("csrc", "stronghold", "benchmarks")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that each script has."""
    add = parser.add_argument
    add("--device", type=torch.device, default=default_device(), metavar="NAME", help="(the accelerator, else cpu)")
    add("--small", action="store_true", help="a rehearsal: tiny sizes; so it is on the CPU")
    add("--minutes", type=float, default=9.5, metavar="N", help="that this may take (9.5)")
    add("--out", type=Path, default=default_out(), metavar="DIR", help="where records go ($OUT, else results/gpu)")
    add("--commit", metavar="NAME", help="to record where this tree is no checkout (a digest of its sources)")
    add("--again", action="store_true", help="also what is recorded already, of this machine and commit")


def default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def default_out() -> Path:
    return Path(os.environ.get("OUT") or RESULTS)


class Recorded:
    """The measurements of one script: those that its file has of this machine and commit, and those that are made.

    A call is what a measurement is known by; one that has failed is known, too, and not made again.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name = name
        self._path = options.out / f"{name}.jsonl"
        self._machine = describe_machine()
        self._machine["commit"] = options.commit or self._machine["commit"] or digest(ROOT)
        self._here = identity(self._machine) | {"device": str(options.device)}
        self.records: list[Record] = []
        if not options.again:
            self.reload()

    def reload(self) -> None:
        """Reads what another process may have added."""
        found = read_records(self._path).records if self._path.exists() else ()
        self.records = [record for record in found if record.get("here") == self._here]

    def find(self, call: Mapping[str, Any]) -> Record | None:
        """Returns the record of ``call``, or None."""
        known = to_line(call)
        return next((record for record in reversed(self.records) if to_line(record["call"]) == known), None)

    def left(self, calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns what of ``calls`` there is no record of."""
        return [call for call in calls if self.find(call) is None]

    def add(self, call: Mapping[str, Any], outcome: Mapping[str, Any]) -> Record:
        """Appends what ``call`` came to, and returns the record."""
        record = {"benchmark": f"gpu/{self._name}", "here": self._here, "call": dict(call), **outcome}
        record = json.loads(to_line(record | {"machine": self._machine}))
        self.records.append(record)
        append_record(self._path, record)
        return record


def identity(machine: Record) -> Record:
    """Returns what two records must have in common to be of the same code on the same kind of machine.

    Not the size of the memory, which a virtual machine may be given little by little.
    """
    host, gpus = machine["host"], machine["gpus"]
    return {
        "commit": machine["commit"],
        "processor": host["processor"],
        "cores": host["cores"],
        "gpus": [gpu["name"] for gpu in gpus],
    }


def digest(root: Path) -> str:
    """Returns a name for the sources below ``root``, for a copy that has no git."""
    sums = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                sums.update(str(path.relative_to(root)).encode())
                sums.update(path.read_bytes())
    return f"tree-{sums.hexdigest()[:12]}"


def name_of(device: torch.device) -> str:
    """Returns the model of ``device``, or nothing where that is not known."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def budget_of(options: argparse.Namespace) -> Budget:
    """Returns the time that is left of ``--minutes``, which begin with the process: its imports may take a minute."""
    return Budget(60 * options.minutes - (time.time() - psutil.Process().create_time()))


class TimeIsUp(BaseException):
    """Ends what is measured. No handler of errors may take it for one of them."""


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    """Ends the block when the time of ``budget`` is up, wherever the main thread is in Python's code by then.

    A measurement that takes longer than all before it was begun in good faith: without its record the table of the
    others is still to be drawn.
    """

    def end(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    try:
        if budget.left_s > 0:  # otherwise nothing is begun
            signal.setitimer(signal.ITIMER_REAL, budget.left_s)
        yield
    except TimeIsUp:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def error_of(error: BaseException) -> str:
    """Returns an error in a line."""
    return line_of(type(error), error)


def line_of(kind: type[Warning] | type[BaseException], message: object) -> str:
    """Returns an error or a warning of ``kind`` in a line."""
    return f"{kind.__name__}: {' '.join(str(message).split())[:300]}"


def say(line: str) -> None:
    """Prints ``line``, as it is and at once: what a command is ended at is then the last line."""
    print(line, flush=True)


def draw(table: Table) -> None:
    """Prints ``table`` as wide as it is, below its title: no line is cut or broken where the output is no terminal."""
    console, title = Console(width=400), table.title  # the widest there is has some 270
    table.title = None
    if title:
        console.print(title, markup=False, highlight=False, style="bold")
    console.print(table)
    sys.stdout.flush()


def end_of(left: Sequence[object], whole: Sequence[object], *, wrong: bool = False) -> int:
    """Says how many measurements there was no time for, and returns what to exit with: 1 if ``wrong``, 3 if some."""
    if left:
        say(f"the time is up: {len(left)} of {len(whole)} are left, and the same command goes on with them")
    return 1 if wrong else 3 if left else 0


def main() -> None:
    """Prints what identifies the code, for the shell scripts to record, and the device that is there."""
    try:
        print(describe_machine()["commit"] or digest(ROOT), default_device())
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
