"""Case 1's search: each method's largest model under limits of device and host memory, a process for each trial."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stronghold.lab.cases.case import Case, Wanted
from stronghold.lab.cases.machines import Machine
from stronghold.lab.cases.measurement import Measurement, from_record
from stronghold.lab.cases.points import in_words, limits_of
from stronghold.lab.cases.reading import TRIALS
from stronghold.lab.cases.running import Place, Say, measured_here, training
from stronghold.lab.records.json_lines import Record, append_record, describe_machine, read_records
from stronghold.lab.records.trials import Limits, end, exit_reason, search, watch
from stronghold.units import format_bytes

STEPS = 3
LEFT_FREE_BYTES = 4 * 2**30
"""What a trial leaves of the disk, on which some methods store their layers."""


def find_largest(
    case: Case, preset: Machine, place: Place, say: Say, *, before_trial: Callable[[], None] = lambda: None
) -> int:
    """Searches for the largest model of each method. Returns how many methods train none at all.

    Trials that the results have already, of this machine and commit, are not made again. What ``before_trial`` raises
    ends the search; another call goes on with it.
    """
    say(
        f"case {case.number}, {case.title.lower()}, --machine {preset.name}: under {format_bytes(preset.device_limit)} "
        f"of device and {format_bytes(preset.host_limit)} of host memory, {preset.first} to {preset.most} layers"
    )
    known = {} if place.again else _known(preset, place)
    failed = 0
    for method in preset.methods:

        def passes(layers: int, method: str = method) -> bool:
            run = Wanted(method, layers, preset.smallest_window if method == "stronghold" else None)
            if (method, layers) not in known:
                before_trial()
                record = attempt(preset, run, place)
                append_record(place.results / TRIALS, record)
                known[method, layers] = from_record(record, str(place.results / TRIALS))
            trial = known[method, layers]
            say(f"{in_words(run)}: {trial.reason or f'trains, in {format_bytes(trial.host_bytes)}'}")
            return not trial.reason

        if not search(passes, preset.first, preset.most, grain=preset.grain):
            failed += 1
            say(f"{method} is left out: no trial of it passed")
    return failed


def attempt(preset: Machine, run: Wanted, place: Place) -> Record:
    """Makes one trial and returns its record; ``reason`` is empty if it passed.

    Where host and device are the same memory, resident memory may be as much as both limits together, and the device's
    part is what the method says that it placed there.
    """
    together = preset.host_limit if place.device.startswith("cuda") else preset.host_limit + preset.device_limit
    place.results.mkdir(parents=True, exist_ok=True)
    free_bytes = max(0, shutil.disk_usage(place.results).free - LEFT_FREE_BYTES)
    limits = Limits(memory_bytes=together, disk_bytes=free_bytes, time_s=place.timeout_s)
    with tempfile.TemporaryDirectory(dir=place.results, prefix="trial-") as folder:
        scratch = Path(folder)
        command = [*training(preset, run, place.device, STEPS), "--warmup", "0"]
        command += ["--out", str(scratch / "run"), "--record", str(scratch / "record.jsonl")]
        with (scratch / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                watched = watch(process, limits, scratch)
            finally:
                end(process)
        reason = watched.reason or exit_reason(process.returncode, (scratch / "output").read_text(errors="replace"))
        trained = read_records(scratch / "record.jsonl").records if (scratch / "record.jsonl").exists() else ()
    record: Record = {**trained[0]} if trained and not reason else _untrained(preset, run, place)
    record |= {
        "limits": asdict(limits_of(preset)),
        "host_bytes": watched.peak_bytes,
        "trial_s": round(watched.trial_s, 1),
    }
    return record | {"reason": reason or verdict(from_record(record, "the trial"), preset, together)}


def verdict(trial: Measurement, preset: Machine, together: int) -> str:
    """Returns why a trial that ended by itself has not passed, nothing if it has."""
    if trial.steps < STEPS:
        return f"took {trial.steps} steps of {STEPS}"
    if trial.wrong:
        return trial.wrong
    if trial.device_bytes > preset.device_limit:
        return f"{format_bytes(trial.device_bytes)} on the device, over its limit"
    return "over the limit of memory" if trial.host_bytes > together else ""


def _untrained(preset: Machine, run: Wanted, place: Place) -> Record:
    """Returns what is recorded of a trial that did not end well: what was tried, and where."""
    settings: dict[str, Any] = {"method": run.method, "layers": run.layers, **preset.shape}
    settings |= {"window": run.window, "device": place.device, "steps": STEPS, "lr": preset.lr}
    return {"settings": settings, "machine": describe_machine()}


def _known(preset: Machine, place: Place) -> dict[tuple[str, int], Measurement]:
    wanted = limits_of(preset)
    here, commit = measured_here(place)
    trials = [item for item in here if item.limits == wanted and item.commit == commit and item.has(preset.shape)]
    return {(item.method, item.layers): item for item in trials}
