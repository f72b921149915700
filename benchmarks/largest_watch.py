"""Watches a trial of largest.py: its memory, its disk and its time, and ends it where it goes beyond one of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import psutil

from stronghold.evaluation.records import Record
from stronghold.units import format_seconds

POLL_S = 0.05
"""How often memory and disk are looked at: the files of a store are there no longer than its run."""


def watch(process: subprocess.Popen[bytes], options: argparse.Namespace, scratch: Path) -> Record:
    """Waits for the trial, and kills it where it goes beyond a limit. Returns its peaks, and why it was killed."""
    begin_s = time.monotonic()
    memory, disk_bytes, reason = Memory(process.pid), 0, ""
    while process.poll() is None:
        now_s = time.monotonic()
        disk_bytes = max(disk_bytes, allocated(scratch))
        if memory.poll() > options.limit:
            reason = "over the limit of memory"
        elif disk_bytes > options.disk:
            reason = "over the limit of disk"
        elif now_s - begin_s > options.timeout:
            reason = f"not done after {format_seconds(options.timeout)}"
        if reason:
            end(process)
            break
        time.sleep(POLL_S)
    disk_bytes = max(disk_bytes, allocated(scratch))
    if not reason and disk_bytes > options.disk:
        reason = "over the limit of disk"
    return {
        "peak_bytes": memory.peak_bytes,
        "disk_bytes": disk_bytes,
        "trial_s": time.monotonic() - begin_s,
        "reason": reason,
    }


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


def end(process: subprocess.Popen[bytes]) -> None:
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
