"""Runs what a case consists of, each run in a process of its own, as ``examples/run.sh`` does."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stronghold.lab.cases.case import Case, Wanted
from stronghold.lab.cases.machines import Machine
from stronghold.lab.cases.measurement import Measurement
from stronghold.lab.cases.points import in_words, layers_of_largest, missing_runs
from stronghold.lab.cases.reading import RUNS, read_results
from stronghold.lab.records.hardware import hardware_of
from stronghold.lab.records.json_lines import describe_machine
from stronghold.lab.records.trials import end, exit_reason

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs are made: the folder of their results, the device, and whether to run again what is there.

    A trial of case 1 that is not done after ``timeout_s`` seconds has failed.
    """

    results: Path
    device: str
    again: bool = False
    timeout_s: float = 3600.0


def training(preset: Machine, run: Wanted, device: str, steps: int) -> list[str]:
    """Returns the command that trains ``run`` in the settings of ``preset``, without where its output goes."""
    words: Sequence[object] = [
        *("--method", run.method, "--layers", run.layers),
        *("--hidden", preset.hidden, "--heads", preset.heads, "--vocabulary", preset.vocabulary),
        *("--batch", preset.batch, "--seq", preset.sequence, "--dtype", preset.dtype),
        *("--steps", steps, "--lr", preset.lr, "--device", device),
        # the CPU's memory is the host's: there is nothing apart from it to limit
        *(("--device-limit", preset.device_limit) if device.startswith("cuda") else ()),
        *(("--window", run.window) if run.window is not None else ()),
        # a store on disk alone would have layers updated in the backward pass, without the clipping of the others
        *(("--store", "disk", "--update", "deferred") if run.method == "zero-infinity-nvme" else ()),
    ]
    return [sys.executable, "-m", "stronghold", "train", *map(str, words)]


def run_case(case: Case, preset: Machine, place: Place, say: Say) -> int:
    """Makes the runs of a case that are not there yet, of this machine and commit. Returns how many failed."""
    here, commit = measured_here(place)
    # what case 1 found to be the largest stays so; a run is made again for a new commit
    found = [item for item in here if item.limits or (item.commit == commit and not place.again)]
    wanted = list(missing_runs(case, preset, found))
    for method in sorted(set(preset.methods) - layers_of_largest(preset, found).keys()) if case.x == "baseline" else ():
        say(f"{method} is left out: its largest model is not known before case 1 has found it")
    total = len(list(missing_runs(case, preset, [item for item in found if item.limits])))
    say(f"case {case.number}, {case.title.lower()}, --machine {preset.name}: {len(wanted)} of {total} runs to make")
    failed = 0
    for number, run in enumerate(wanted, start=1):
        say(f"run {number} of {len(wanted)}: {in_words(run)}")
        if reason := _train(preset, run, place):
            failed += 1
            say(f"  {in_words(run)} is left out: {reason}")
    return failed


def measured_here(place: Place) -> tuple[list[Measurement], str]:
    """Returns the results of this machine, and the commit that is checked out."""
    machine = describe_machine()
    results = read_results([place.results]).measurements if place.results.exists() else ()
    hardware = hardware_of({"settings": {"device": place.device}, "machine": machine})
    here = [item for item in results if item.machine == hardware and not item.artifact]
    return here, machine["commit"] or ""


def _train(preset: Machine, run: Wanted, place: Place) -> str:
    """Makes one run, whose output goes to this terminal. Returns why it failed, if it did."""
    window = preset.window if run.window is None else run.window  # as run.sh names all logs, the artifact's did too
    shape = f"{run.method}_l-{run.layers}_h-{preset.hidden}_bs-{preset.batch}"
    name = f"{shape}_ws-{window}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    output = ["--log", place.results / f"log_{name}.txt", "--record", place.results / RUNS]
    output += ["--out", place.results / "runs" / name]
    command = training(preset, run, place.device, preset.steps) + [str(word) for word in output]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        _, said = process.communicate()
    finally:
        end(process)  # where we are ended ourselves
    return exit_reason(process.returncode, said)
