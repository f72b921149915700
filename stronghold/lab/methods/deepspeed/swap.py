"""The files that DeepSpeed swaps to, and what goes through them."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from pathlib import Path

import psutil

from stronghold.step_times import StepTimes


class Swap:
    """A new folder in ``directory`` that goes with this process, and the process's traffic with disks."""

    def __init__(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path = tempfile.mkdtemp(prefix="swap-", dir=directory)
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._process = psutil.Process()
        self._before = self._process.io_counters()
        self._begin = time.perf_counter()

    def bytes(self) -> int:
        """Returns what its files take on the disk."""
        return sum(file.stat().st_blocks * 512 for file in Path(self.path).rglob("*") if file.is_file())

    def since_last(self) -> StepTimes:
        """Returns what was read and written since the call before; of the time, only the total."""
        now, counted = time.perf_counter(), self._process.io_counters()
        step = StepTimes(
            total_s=now - self._begin,
            compute_s=0.0,
            fetch_wait_s=0.0,
            update_wait_s=0.0,
            disk_wait_s=0.0,
            fetches=0,
            fetched_bytes=0,
            gradient_bytes=0,
            disk_read_bytes=counted.read_bytes - self._before.read_bytes,
            disk_written_bytes=counted.write_bytes - self._before.write_bytes,
        )
        self._begin, self._before = now, counted
        return step
