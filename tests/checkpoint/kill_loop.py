"""Kills trainings at random moments, lets each go on, and compares its losses with those of one that ran through.

``python -m tests.checkpoint.kill_loop --kills 100`` is the long form of what ``test_kill.py`` runs. Every training is a
process of its own, forked from this one, which has imported everything and computed nothing; it is killed with
SIGKILL while it starts, in a step, while it writes a checkpoint, or when the clock says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.utils.tensorboard  # imports for seconds: here, once
from rich.console import Console

import stronghold.lab.methods.stronghold  # noqa: F401
from stronghold.lab.records.runs import read_run
from stronghold.lab.settings import DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from stronghold.lab.training import train
from stronghold.settings import OffloadSettings

STEPS = 10
EVERY = 2
MOMENTS = ("checkpoint", "start", "step", "clock")


def settings_in(folder: Path, name: str, number: int) -> TrainSettings:
    """Returns the settings of one training, with dropout and clipping.

    Every second one is with bf16, and on disk, in a store that keeps it.
    """
    other = number % 2 == 1
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{word} is followed by {word + 1}. " for word in range(300)))
    return TrainSettings(
        out=str(folder / name),
        model=ModelSettings(layers=3, hidden=32, heads=2, vocabulary=256, dropout=0.1),
        data=DataSettings(source=str(text)),
        optimizer=OptimizerSettings(lr=1e-2, warmup_steps=3, max_grad_norm=0.5, states="8bit" if other else "fp32"),
        offload=OffloadSettings(window=2, store=str(folder / f"{name}-store") if other else "ram"),
        dtype="bf16" if other else "fp32",
        batch=2,
        sequence=32,
        steps=STEPS,
        checkpoint_every=EVERY,
        resume=True,
        keep_store=other,
    )


def begin(settings: TrainSettings) -> int:
    """Starts a training in a process of its own; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        with open(f"{settings.out}.txt", "a", encoding="utf-8") as file:
            train(settings, console=Console(file=file, width=200))
        code = 0
    except BaseException as error:
        print(f"{settings.out}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """Returns the exit code of a process, or None while it runs."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_at(child: int, moment: Callable[[], bool], delay_s: float) -> tuple[bool, int | None]:
    """Kills ``child`` when ``moment`` has come and ``delay_s`` passed; returns whether, and its exit code."""
    while not moment():
        if (code := ended(child)) is not None:
            return False, code
        time.sleep(0.0005)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code == -signal.SIGKILL, code


def moment_of(kind: str, settings: TrainSettings, generator: random.Random, whole_s: float) -> tuple[Any, float]:
    """Returns what to wait for, and how long from there."""
    out, log = Path(settings.out), Path(settings.out) / "log.jsonl"
    if kind == "checkpoint":
        known = set(out.glob("checkpoints/*"))

        def writing() -> bool:
            return any(path.name.startswith(".") for path in set(out.glob("checkpoints/.*")) - known)

        return writing, generator.uniform(0, 0.05)
    if kind == "step":
        wanted = _steps(log) % STEPS + generator.randint(1, 3)
        return lambda: _steps(log) >= min(wanted, STEPS - 1), generator.uniform(0, 0.03)
    return lambda: True, generator.uniform(0, 0.3 if kind == "start" else whole_s)


def _steps(log: Path) -> int:
    return log.read_text(errors="replace").count('"event": "step"') if log.exists() else 0


def losses(settings: TrainSettings) -> list[tuple[int, Any, float]]:
    return [(step["step"], step["loss"], step["lr"]) for step in read_run(settings.out).steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-one-run", type=int, default=5, help="kills before a training may end (default: 5)")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        expected, whole_s = {}, 0.0
        for number in range(2):
            settings = settings_in(folder, f"whole-{number}", number)
            start = time.monotonic()
            child = begin(dataclasses.replace(settings, checkpoint_every=None))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            whole_s = max(whole_s, time.monotonic() - start)
            expected[number] = losses(settings)
            assert len(expected[number]) == STEPS
        run = 0
        while counts["killed"] < arguments.kills:
            settings = settings_in(folder, f"run-{run}", run)
            goal = min(counts["killed"] + arguments.in_one_run, arguments.kills)
            code = None
            while counts["killed"] < goal and code is None:
                kind = MOMENTS[counts["killed"] % len(MOMENTS)]
                moment, delay_s = moment_of(kind, settings, generator, whole_s)
                killed, code = kill_at(begin(settings), moment, delay_s)
                if killed:
                    counts["killed"] += 1
                    counts[kind] += 1
                    code = None
                elif code:
                    return _failed(settings, f"ended with exit code {code}")
            while code is None:
                child = begin(settings)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if code:
                    return _failed(settings, f"could not go on: exit code {code}")
            if losses(settings) != expected[run % 2]:
                return _failed(settings, f"has other losses: {losses(settings)}, not {expected[run % 2]}")
            shown = Path(f"{settings.out}.txt").read_text()
            counts["resumed"] += shown.count("resume     from")
            counts["skipped"] += shown.count("skipped    ")
            run += 1
    print(json.dumps({"runs": run, **counts}))
    return 0


def _failed(settings: TrainSettings, what: str) -> int:
    print(f"{settings.out} {what}\n{Path(f'{settings.out}.txt').read_text()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
