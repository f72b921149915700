"""What goes on beside a layer's computation: how long each takes then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from stronghold.probing.stopwatches import DeviceClock

HOST_LAYER, DEVICE_LAYER = (512, 512), (4096, 2048)
"""Rows and width of what is computed beside."""


class SmallLayer:
    """What a layer computes, in small: two products and an activation."""

    def __init__(self, dtype: torch.dtype, clock: DeviceClock) -> None:
        self._clock = clock
        rows, width = HOST_LAYER if clock.device.is_host else DEVICE_LAYER
        device = clock.device.torch_device
        self._x = torch.full((rows, width), 0.5, dtype=dtype, device=device)
        self._up = torch.full((width, 4 * width), 1e-3, dtype=dtype, device=device)
        self._down = torch.full((4 * width, width), 1e-3, dtype=dtype, device=device)

    def compute(self) -> None:
        torch.mm(torch.nn.functional.gelu(torch.mm(self._x, self._up)), self._down)

    def timed(self, least_s: float, until: Callable[[], bool] = lambda: True) -> float:
        """Returns the seconds of one layer, computed over and over for ``least_s`` and ``until`` that is true."""
        calls, begin_s = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - begin_s) < least_s or not until():
            self.compute()
            self._clock.wait()
            calls += 1
        return taken_s / max(1, calls)

    def timed_beside(self, task: Callable[[], object], least_s: float, *, least: int = 1) -> tuple[float, float]:
        """Returns the seconds of one layer and of one ``task``, while both go on over and over.

        That is for ``least_s`` and until so many tasks at the least have ended; a thread carries them out. Raises what
        a task raises.
        """
        taken_s, failed, stopped = list[float](), list[BaseException](), threading.Event()

        def work() -> None:
            try:
                while not stopped.is_set():
                    begin_s = time.perf_counter()
                    task()
                    taken_s.append(time.perf_counter() - begin_s)
            except BaseException as error:  # raised where it is waited for
                failed.append(error)

        thread = threading.Thread(target=work, name="stronghold-probe", daemon=True)
        thread.start()
        try:
            layer_s = self.timed(least_s, until=lambda: len(taken_s) >= least or not thread.is_alive())
            counted = len(taken_s)  # the last one began beside the layer, and ends alone
        finally:
            stopped.set()
            thread.join()
        if failed:
            raise failed[0]
        return layer_s, sum(taken_s[:counted]) / counted
