"""Every method on the same training, one after another, each in a process of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stronghold.lab.command import WRONG_USAGE, error_in
from stronghold.lab.methods import METHODS, ON_DISK
from stronghold.lab.outputs import LOG_NAME, plain_console
from stronghold.lab.records.agreement import AGAIN, REFERENCE, comparison_notes, comparison_table
from stronghold.lab.records.json_lines import Record, append_record, check_records, describe_machine, read_records
from stronghold.lab.records.runlog import check_run_folder
from stronghold.lab.records.runs import read_run
from stronghold.lab.settings import TrainSettings

LOG_WIDTH = 120
"""Of a table that goes to a file: its longest line."""


def compare(settings: TrainSettings, arguments: Sequence[str], *, console: Console | None = None) -> list[Record]:
    """Trains by every method as the command line ``arguments``, which ``settings`` come from, say.

    Each has its folder in ``settings.out``, and its log beside ``settings.log``. Shows their steps, and at the end a
    table. A method that fails or refuses is a record with an ``error``, and does not stop the others. Returns the
    records, which are appended to ``settings.record`` as they arise. Raises ValueError for what several methods cannot
    share.
    """
    console = console or plain_console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    for name, value in (("save", settings.save), ("checkpoint_every", settings.checkpoint_every)):
        if value is not None:
            raise ValueError(f"{name} is for one method at a time (got {value!r} with method='all'); leave it out")
    if settings.resume:
        raise ValueError("a comparison cannot be resumed (got resume=True with method='all'); begin a new one")
    settings.check_outputs()
    check_records(settings.record)
    records = []
    for method in METHODS:
        folder = Path(settings.out) / method
        check_run_folder(folder)
        console.print(f"\n{method}", style="bold", highlight=False)
        if method == AGAIN:
            console.print(
                f"({REFERENCE} once more, in other rounding: verdicts heed what separates the two)", highlight=False
            )
        error = _run([*arguments, *_own_arguments(settings, method, folder)], folder, console)
        record = _record(replace(settings, method=method, out=str(folder)), folder, error)
        shutil.rmtree(folder / "store", ignore_errors=True)  # memory of a process that has ended
        if error:
            console.print(error, soft_wrap=True, markup=False, highlight=False)
        if settings.record:
            append_record(settings.record, record)
        records.append(record)
    console.print()
    _show(records, console)
    if settings.log:
        with Path(settings.log).open("w", encoding="utf-8") as file:
            _show(records, plain_console(file=file, width=LOG_WIDTH))
    return records


def _show(records: Sequence[Record], console: Console) -> None:
    console.print(comparison_table(records))
    for line in comparison_notes(records):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _own_arguments(settings: TrainSettings, method: str, folder: Path) -> list[str]:
    """Returns what follows the arguments that all share, and replaces some of them.

    What only stronghold has is taken back from the others. Clipping is said to all, for it depends on the store where
    it is not said.
    """
    own = ["--method", method, "--out", str(folder), "--record", str(folder / "record.jsonl")]
    own += ["--log", str(_log_of(settings, method, folder)), "--clip", str(settings.optimizer.max_grad_norm or 0)]
    if method not in ON_DISK:
        own += ["--store", "ram"]
    if method != "stronghold":
        own += ["--resident", "0", "--states", "fp32", "--update", "deferred", "--nonfinite", "raise", "--no-compile"]
    return own


def _log_of(settings: TrainSettings, method: str, folder: Path) -> Path:
    """Returns where a method's log goes: beside that of all, ``log_all_x.txt``, as ``log_METHOD_x.txt``."""
    if settings.log is None:
        return folder / "log.txt"
    log = Path(settings.log)
    if "_all_" in log.name:
        return log.with_name(log.name.replace("_all_", f"_{method}_", 1))
    return log.with_name(f"{log.stem}_{method}{log.suffix}")


def _run(arguments: Sequence[str], folder: Path, console: Console) -> str:
    """Runs ``stronghold`` and shows its steps; all that it says goes to output.txt. Returns why it failed, if so."""
    folder.mkdir(parents=True, exist_ok=True)
    said = told = ""
    with (folder / "output.txt").open("w", encoding="utf-8") as file, _started(arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            said = line.strip() or said
            told = error_in([line]) or told
            if line.startswith("step "):
                console.print(line.rstrip(), soft_wrap=True, markup=False, highlight=False)
        code = process.wait()
    if code == 0:
        return ""
    if code < 0:
        return f"failed: ended by {signal.Signals(-code).name}{', out of memory?' if code == -signal.SIGKILL else ''}"
    reason = told or said  # what is behind an error is a library's
    return f"refused: {reason}" if code == WRONG_USAGE else f"failed: {reason}"


@contextmanager
def _started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts ``stronghold`` for the length of the block; it ends with the block, which SIGTERM and SIGHUP interrupt."""
    command = [sys.executable, "-m", "stronghold", *arguments]
    asked = running = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        if running:  # before, an exception would leave a process that nobody knows
            raise KeyboardInterrupt

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in ending}
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            try:
                running = True
                if asked:
                    raise KeyboardInterrupt
                yield process
            except BaseException:
                process.terminate()
                raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record(settings: TrainSettings, folder: Path, error: str) -> Record:
    """Returns what a run left behind: its own record, or of one that failed its settings, losses and ``error``."""
    if not error:
        return read_records(folder / "record.jsonl").records[-1]
    if (folder / LOG_NAME).exists():
        run = read_run(folder)
        start = {name: run.start[name] for name in ("settings", "machine", "parameters")}
        return {**start, "error": error, "losses": [step["loss"] for step in run.steps]}
    return {"settings": settings.flat(), "machine": describe_machine(), "error": error, "losses": []}
