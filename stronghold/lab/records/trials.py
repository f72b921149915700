"""Trials: processes that train under limits of memory, disk and time, and the search for the largest that passes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stronghold.lab.command import error_in
from stronghold.units import format_seconds

POLL_S = 0.05
"""How often memory and disk are looked at: the files of a store are there no longer than its run."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a trial may take: resident memory and disk in bytes, time in seconds."""

    memory_bytes: int
    disk_bytes: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A trial's peaks in bytes and its time; ``reason`` is why it was killed, empty if it ended by itself."""

    peak_bytes: int
    disk_bytes: int
    trial_s: float
    reason: str


def search(passes: Callable[[int], bool], first: int, most: int, *, grain: int = 1) -> int:
    """Returns the largest number in [0, most] that passes, 0 if ``first`` and all below it fail.

    Doubles from ``first`` until a trial fails, then halves what is between; what passes is taken to pass below, too.
    It ends when the number that it returns and one that fails are ``grain`` apart.
    """
    good, bad, number = 0, most + 1, min(first, most)
    while number < bad:
        if passes(number):
            good, number = number, min(2 * number, most)
            if good == most:
                break
        else:
            bad = number
    while bad - good > (grain if good else 1):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good


def watch(process: subprocess.Popen[bytes], limits: Limits, folder: Path) -> Watched:
    """Waits for a trial that stores below ``folder``, and kills it where it goes beyond a limit."""
    begin_s = time.monotonic()
    memory, disk_bytes, reason = Memory(process.pid), 0, ""
    with signals_kept() as kept:
        while process.poll() is None and not kept:
            now_s = time.monotonic()
            disk_bytes = max(disk_bytes, allocated(folder))
            if memory.poll() > limits.memory_bytes:
                reason = "over the limit of memory"
            elif disk_bytes > limits.disk_bytes:
                reason = "over the limit of disk"
            elif now_s - begin_s > limits.time_s:
                reason = f"not done after {format_seconds(limits.time_s)}"
            if reason:
                end(process)
                break
            time.sleep(POLL_S)
    disk_bytes = max(disk_bytes, allocated(folder))
    if not reason and disk_bytes > limits.disk_bytes:
        reason = "over the limit of disk"
    trial_s = time.monotonic() - begin_s
    return Watched(peak_bytes=memory.peak_bytes, disk_bytes=disk_bytes, trial_s=trial_s, reason=reason)


@contextmanager
def signals_kept() -> Iterator[list[int]]:
    """Keeps SIGTERM and Ctrl-C, and hands them on behind the block. In a thread but the main one they do not arrive.

    A handler that raises within ``Popen.poll`` can leave its lock held, for which whoever ends the process would wait.
    """
    kept: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handlers[number] = signal.signal(number, lambda number, _: kept.append(number))
    try:
        yield kept
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived in kept:
            signal.raise_signal(arrived)


def exit_reason(code: int, said: str) -> str:
    """Returns why a trial ended by itself without success: the error that it told, or the last line that it said."""
    if code == 0:
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = error_in(lines) or (lines[-1] if lines else "no message")
    return f"ended with {code}: {reason[:300]}"


class Memory:
    """The peak resident memory of a process and its children, each one's summed.

    Between fork and exec a child shows its parent's memory as its own: what has the root's command line does not count.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._peaks: dict[int, int] = {}
        self._seen: set[int] = set()

    @property
    def peak_bytes(self) -> int:
        return sum(self._peaks.values())

    def poll(self) -> int:
        """Looks once, and returns the peak so far."""
        try:
            children = {child.pid for child in psutil.Process(self._root).children(recursive=True)}
        except psutil.Error:
            children = set()
        own = command_line(self._root)
        for pid in [self._root, *(pid for pid in children & self._seen if command_line(pid) != own)]:
            self._peaks[pid] = max(self._peaks.get(pid, 0), resident_peak(pid))
        self._seen |= children
        return self.peak_bytes


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def resident_peak(pid: int) -> int:
    """Returns a process's VmHWM in bytes, 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def allocated(folder: Path) -> int:
    """Returns the bytes on disk of the files below ``folder``; some may vanish meanwhile."""
    total = 0
    for name, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(name, file)).st_blocks * 512
            except OSError:
                continue
    return total


def end(process: subprocess.Popen[Any]) -> None:
    """Kills the trial and its children if they still run, and waits for it."""
    try:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.Error:
        children = []
    for child in children:
        try:
            child.kill()
        except psutil.Error:
            continue
    process.kill()
    process.wait()
