"""What processes of this machine have computed, read and written: how one that works is told from one that hangs."""

from __future__ import annotations

import ast
from typing import NamedTuple

import psutil


class Spent(NamedTuple):
    """What a process has spent up to now, all its threads together."""

    computed_s: float
    moved_bytes: float = 0.0
    """Read from and written to disks."""
    runs: bool = False
    """Whether it has a processor, or waits for one, at this moment: it works, however little a busy machine gives."""


_WORKS = 0.1
"""The share of a core above which a process works: the one that has the store serves the others, whatever it does."""
_ENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def identity(process: psutil.Process) -> tuple[int, float]:
    """Returns what no other process of the machine has: the number and the time of its beginning."""
    return process.pid, process.create_time()


def known_process(known: str | None) -> psutil.Process | None:
    """Returns the process whose :func:`identity` this is as text, or None where it has ended."""
    if known is None:
        return None
    pid, begun = ast.literal_eval(known)
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == begun else None
    except psutil.Error:
        return None


def spent(process: psutil.Process) -> Spent:
    """Returns what a process has spent."""
    times, moved = process.cpu_times(), 0.0
    if hasattr(process, "io_counters"):
        counters = process.io_counters()
        moved = float(counters.read_bytes + counters.write_bytes)
    return Spent(times.user + times.system, moved, process.status() == psutil.STATUS_RUNNING)


def spent_by_children(process: psutil.Process) -> dict[int, Spent]:
    """Returns what each living child of a process has spent, and each of theirs, by its number."""
    found = {}
    for child in process.children(recursive=True):
        try:
            found[child.pid] = spent(child)
        except psutil.Error:  # it has ended meanwhile, or is another user's
            continue
    return found


def has_worked(before: Spent, now: Spent, seconds: float) -> bool:
    """Whether it runs, or spent in so many ``seconds`` more than what goes on beside all work: a tenth of a core."""
    return now.runs or now.computed_s - before.computed_s > _WORKS * seconds or now.moved_bytes != before.moved_bytes


class Others:
    """Which other processes of this machine work, though nothing is heard of them.

    One that is in a long call which holds Python's lock has no thread that could say so.
    """

    def __init__(self, still_s: float) -> None:
        self._still_s = still_s
        self._before: dict[str, tuple[Spent, float]] = {}
        self._worked_s: dict[str, float] = {}

    def works(self, known: str | None, now_s: float) -> bool:
        """Whether the process of this identity is neither stopped nor ended, and has worked in the last ``still_s``.

        The first time that it is asked for it may have.
        """
        process = known_process(known)
        if process is None or known is None:
            return False
        try:
            found = None if process.status() in _ENDED else spent(process)
        except psutil.Error:
            found = None
        if found is None:
            self._before.pop(known, None)  # one that goes on begins anew
            self._worked_s.pop(known, None)
            return False
        before, since_s = self._before.setdefault(known, (found, now_s))
        worked_s = self._worked_s.setdefault(known, now_s)
        if found.runs or now_s - since_s >= self._still_s / 5:
            if has_worked(before, found, now_s - since_s):
                worked_s = self._worked_s[known] = now_s
            self._before[known] = found, now_s
        return now_s - worked_s < self._still_s
