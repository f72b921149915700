"""Times work on a device: so often at once that the clock can tell, and by the device's own clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from stronghold.device import Device

LEAST_S = 0.015
"""What is timed takes so long, over and over if need be."""
BUSY_SIZE = 4096
"""Of the square matrices whose product keeps a device busy."""
BUSY_CALLS = 4
"""Products by which it is found how long one takes."""
LONGER = 1.5
"""How much longer a device is kept busy than issuing should take."""
MOST_BUSY_S = 0.05
MOST_CALLS = 400
"""Below what a device's queue takes before a launch blocks."""


class DeviceClock:
    """Times what the calling thread computes on ``device``.

    On a device that runs behind the host, work is issued behind other work that keeps the device busy meanwhile: what
    is timed is the device's time, not that of issuing.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._counts: dict[Callable[[], object], int] = {}
        self._busy: torch.Tensor | None = None
        self._busy_s = 0.0
        if not device.is_host:
            self._busy = torch.ones(BUSY_SIZE, BUSY_SIZE, dtype=torch.bfloat16, device=device.torch_device)
            self._work(BUSY_CALLS)  # a device that had nothing to do is slow
            begin = device.stamp()
            self._work(BUSY_CALLS)
            self._busy_s = device.seconds(begin, device.stamp()) / BUSY_CALLS

    def timed(self, task: Callable[[], object], *, calls: int = 0) -> float:
        """Returns the seconds of one ``task``: the mean of ``calls``, by default of as many as take LEAST_S."""
        calls = calls or self._calls(task)
        self._keep_busy(calls, task)
        begin = self.device.stamp()
        for _ in range(calls):
            task()
        return self.device.seconds(begin, self.device.stamp()) / calls

    def issued(self, task: Callable[[], object], *, calls: int = 0) -> float:
        """Returns the seconds that the calling thread takes to issue one ``task``."""
        calls = calls or self._calls(task)
        self.wait()
        begin_s = time.perf_counter()
        for _ in range(calls):
            task()
        issued_s = (time.perf_counter() - begin_s) / calls
        self.wait()
        return issued_s

    def wait(self) -> None:
        """Waits until the device has done what was issued."""
        self.device.host_wait(self.device.record_event())

    def _calls(self, task: Callable[[], object]) -> int:
        """Returns how often to call ``task``, found when it is timed first, by calls that warm up."""
        if task not in self._counts:
            calls = 1
            task()
            while True:
                begin = self.device.stamp()
                for _ in range(calls):
                    task()
                taken_s = self.device.seconds(begin, self.device.stamp())
                if taken_s >= LEAST_S or calls >= MOST_CALLS:
                    break
                calls = min(MOST_CALLS, max(2 * calls, round(1.2 * calls * LEAST_S / max(taken_s, 1e-7))))
            self._counts[task] = calls
        return self._counts[task]

    def _keep_busy(self, calls: int, task: Callable[[], object]) -> None:
        """Gives the device what it has to do while ``task`` is issued so often."""
        if self._busy is not None:
            self.wait()
            begin_s = time.perf_counter()
            task()
            issued_s = min(MOST_BUSY_S, LONGER * calls * (time.perf_counter() - begin_s))
            self._work(math.ceil(issued_s / max(self._busy_s, 1e-5)))

    def _work(self, products: int) -> None:
        assert self._busy is not None
        for _ in range(products):
            torch.mm(self._busy, self._busy)
