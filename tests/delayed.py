"""A CPU device that is as treacherous as a GPU may be: everything late, and the computation late too."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stronghold.device import CpuDevice, Event, Stream


class RaceError(AssertionError):
    """A buffer changed while a computation that had been issued still read it."""


class DelayedStream(Stream):
    """Waits before each copy and each piece of host work, as long as ``delays`` say for this stream."""

    def __init__(self, name: str, delays: Delays) -> None:
        self.delays = delays
        super().__init__(name)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self.delays.sleep(self.name)
        target.copy_(source)

    def run(self, task, moved_bytes: int = 0) -> None:
        def late() -> None:
            self.delays.sleep(self.name)
            task()

        super().run(late, moved_bytes)


class Delays:
    """Seconds to be late, drawn anew each time between zero and the longest of the stream."""

    def __init__(self, seed: int, **longest_s: float) -> None:
        self._random = random.Random(seed)
        self.longest_s = longest_s

    def sleep(self, stream: str) -> None:
        longest = self.longest_s.get(stream, 0.0)
        if longest:
            time.sleep(self._random.uniform(0.2, 1.0) * longest)


class DelayedDevice(CpuDevice):
    """The CPU whose streams are late, and whose computation lags behind the thread that issues it.

    Autograd computes at once, in the caller's thread. What a GPU would still be doing is played by a stream of its
    own: copies within the computation happen there, late, and a computation ends there, late, with a check that
    nobody has overwritten what it reads. ``compute_mark`` is behind all of that, as an event on a CUDA stream would be.
    """

    def __init__(self, seed: int = 0, **longest_s: float) -> None:
        self.delays = Delays(seed, **longest_s)
        self.races: list[str] = []
        super().__init__()
        self.lag = self.stream("compute")

    def stream(self, name: str) -> Stream:
        return DelayedStream(name, self.delays)

    def compute_wait(self, event: Event) -> None:
        self.lag.wait(event)
        event.wait()

    def compute_mark(self) -> Event:
        return self.lag.record()

    def compute_copy(self, target: Tensor, source: Tensor, *, add: bool = False) -> None:
        source = source.detach().clone()  # what the computation has produced; autograd may free or reuse it

        def late() -> None:
            (target.add_ if add else target.copy_)(source)

        self.lag.run(late)

    def compute_run(self, task) -> None:
        self.lag.run(task)

    def compute_now(self, task, moved_bytes: int = 0) -> None:
        self.lag.record().wait()  # autograd computes at once: it would not wait for what happens late
        task()

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        for buffer in reads:
            before = buffer.clone()

            def check(buffer: Tensor = buffer, before: Tensor = before) -> None:
                if not torch.equal(buffer, before):
                    self.races.append("a slot was overwritten while a computation still read it")

            self.lag.run(check)

    def settle(self) -> None:
        """Waits until all streams have done what they were given, and raises RaceError for what was seen."""
        for stream in (self.fetches, self.edges, self.gradients, self.updates, self.lag):
            stream.record().wait()
        if self.races:
            raise RaceError(f"{len(self.races)} races: {self.races[0]}")
