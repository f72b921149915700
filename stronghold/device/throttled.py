"""A device of given speed, on the CPU: to see what a schedule makes of a machine that is not at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stronghold.device.cpu import CpuDevice
from stronghold.device.events import Event
from stronghold.device.streams import Stream
from stronghold.device.timeline import Stamp
from stronghold.device.work_line import AtOnce, Task, never_at_once


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a machine sustains: FLOP/s of its device, bytes/s of its link each way, of its host and of its device."""

    flops: float
    up: float
    down: float
    host: float
    device: float = math.inf


class ThrottledDevice(CpuDevice):
    """Runs the real engine on small layers and charges the time that large ones would take.

    Every parameter counts as ``scale`` parameters, each layer's computation as 2 FLOP per parameter and token in the
    forward pass and 6 in the backward pass (4, and 2 to recompute, which ``keeps`` leaves out). What the device
    iterates beside an update of n matrices begins when 1/2n of the update's own work is done, and the last 1/2n waits
    for it; its matrix products count as they are. Streams and computation
    keep clocks in seconds: an operation begins when the one before it and all that it waits for have ended, and events
    carry the time from stream to stream. With ``paced`` every thread also sleeps until its clock, so that the wall
    clock shows what the engine's own overhead adds; without, the clocks alone tell, the same on every run. What takes
    real time, such as a disk, counts with ``paced`` alone.
    """

    is_host = False

    def __init__(
        self, speed: Speed, *, tokens: int, scale: float = 1.0, paced: bool = False, keeps: bool = False
    ) -> None:
        self.speed = speed
        self.tokens = tokens
        self.scale = scale
        self.paced = paced
        self.keeps = keeps
        self.clock_s = 0.0
        self.busy_s = {"compute": 0.0, "fetches": 0.0, "root": 0.0, "gradients": 0.0, "updates": 0.0}
        self.busy_s["iterations"] = 0.0
        """Seconds of work given to each resource so far."""
        self._origin_s = time.perf_counter()
        super().__init__()

    def stream(self, name: str) -> Stream:
        return _ThrottledStream(name, self)

    def compute_wait(self, event: Event) -> None:
        event.wait()
        self.clock_s = max(self.clock_s, event.time)

    host_wait = compute_wait  # the thread that waits is the one that computes

    def record_event(self) -> Event:
        event = Event()
        event.time = self.clock_s
        event.happen()
        return event

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        flops = (2 if not backward else 4 if self.keeps else 6) * parameters * self.scale * self.tokens
        self._compute(flops / self.speed.flops)

    def compute_now(self, task: Task, moved_bytes: int = 0) -> None:
        iterations_s = self._products_s(task)
        self._compute(moved_bytes * self.scale / self.speed.device + iterations_s)

    def beside(self, task: Task) -> Event:
        iteration_s = self._products_s(task)
        self.busy_s["iterations"] += iteration_s
        assert isinstance(self.updates, _ThrottledStream)
        self.updates.iterations_s.append(iteration_s)
        done = Event()
        done.happen()  # what waits for it is charged with the update
        return done

    def _products_s(self, task: Task) -> float:
        """Carries ``task`` out; returns the seconds of its matrix products, as PyTorch counts their operations."""
        with FlopCounterMode(display=False) as counter:
            task()
        return counter.get_total_flops() / self.speed.flops

    def _compute(self, spent_s: float) -> None:
        self.busy_s["compute"] += spent_s
        self.clock_s += spent_s
        self.clock_s = self.paced_until(self.clock_s)

    def paced_until(self, clock_s: float) -> float:
        """Sleeps until ``clock_s``, where that is to be; returns the time then: later where the work was slower."""
        if not self.paced:
            return clock_s
        if (left_s := self._origin_s + clock_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            return clock_s
        return time.perf_counter() - self._origin_s

    def stamp(self) -> float:
        return self.clock_s


class _ThrottledStream(Stream):
    def __init__(self, name: str, device: ThrottledDevice) -> None:
        self._device = device
        self._clock_s = 0.0
        self.iterations_s: list[float] = []
        """Of the update that is under way."""
        super().__init__(name)

    def copy(self, target: Tensor, source: Tensor) -> None:
        speed, moved_bytes = self._device.speed, source.numel() * source.element_size()
        rate = speed.down if self.name == "gradients" else speed.up
        self._timed(lambda: self._copy(target, source), moved_bytes / rate)

    def run(self, task: Task, moved_bytes: int = 0) -> None:
        # Other streams read a disk, which takes its own time.
        self._timed(task, moved_bytes / self._device.speed.host if self.name == "updates" else 0.0)

    def submit(self, task: Task) -> None:
        self._timed(task, 0.0)

    def stamp(self) -> Stamp:
        stamp, issued_s = Stamp(), self._device.clock_s
        self._give(lambda: stamp.put(max(self._clock_s, issued_s)), stamp.fail)
        return stamp

    def _queue(self, task: Task, at_once: AtOnce = never_at_once) -> None:
        issued_s = self._device.clock_s

        def begin() -> None:
            self._clock_s = max(self._clock_s, issued_s)
            task()

        super()._queue(begin)

    def _is_past(self, event: Event) -> bool:
        return False  # it may be by the wall clock, and not by this stream's

    def _block_on(self, event: Event) -> None:
        super()._block_on(event)
        self._clock_s = max(self._clock_s, event.time)

    def _happen(self, event: Event) -> None:
        event.time = self._clock_s
        super()._happen(event)

    def _timed(self, task: Task, spent_s: float) -> None:
        spent_s *= self._device.scale
        if self.name in self._device.busy_s:
            self._device.busy_s[self.name] += spent_s

        def timed() -> None:
            self.iterations_s.clear()
            task()
            taken_s = spent_s
            if self.iterations_s:
                end_s = spent_s / (2 * len(self.iterations_s))
                taken_s = 2 * end_s + max(sum(self.iterations_s), spent_s - 2 * end_s)
            self._clock_s = self._device.paced_until(self._clock_s + taken_s)

        super().submit(timed)
