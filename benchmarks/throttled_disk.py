"""A disk of given speed: the real one's transfers, each of which ends when a slower disk would have ended it."""

from __future__ import annotations

import heapq
import threading
import time
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from stronghold import native
from stronghold.native import Disk, Transfer


class ThrottledDisk(Disk):
    """Carries out one transfer at a time, the most urgent first; one under way gives way to a more urgent one."""

    def __init__(self, *, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        super().__init__()
        self._rates = {False: read_bytes_per_s, True: write_bytes_per_s}
        self._queue: list[tuple[int, int, _Timed]] = []
        self._submitted = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def _submit(self, file, write, memory, offset, priority, sums, verify) -> Any:  # type: ignore[no-untyped-def]
        timed = _Timed(super()._submit(file, write, memory, offset, priority, sums, verify))
        timed.left_s = memory.nbytes / self._rates[write]
        with self._changed:
            self._submitted += 1
            heapq.heappush(self._queue, (int(priority), self._submitted, timed))
            self._changed.notify()
        return timed

    def _work(self) -> None:
        with self._changed:
            while True:
                while not self._queue:
                    self._changed.wait()
                timed, begin_s = self._queue[0][2], time.perf_counter()
                self._changed.wait(timed.left_s)
                timed.left_s -= time.perf_counter() - begin_s
                if timed.left_s > 0:
                    continue  # a more urgent one has come
                self._queue.remove(next(entry for entry in self._queue if entry[2] is timed))
                heapq.heapify(self._queue)
                timed.over.set()
                if self._queue:
                    self._queue[0][2].left_s += timed.left_s  # the disk was free before this thread woke up


class _Timed:
    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.left_s = 0.0
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set() and self.transfer.done()

    def wait(self) -> bool:
        self.over.wait()
        return self.transfer.wait()

    def times(self) -> tuple[float, float]:
        return self.transfer.times()


def updates_that_take(element_s: float) -> AbstractContextManager[Any]:
    """Replaces the optimizer's kernel by one that takes ``element_s`` per element, where it has its operands.

    What the thread that computes updates itself, of resident units, has a time of the device's own.
    """

    def slow(segments: list[native.Segment], *, threads: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(element_s * sum(segment.weight.numel() for segment in segments))

    return mock.patch.object(native, "adamw", slow)
