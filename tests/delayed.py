"""A CPU device that is as treacherous as a GPU may be: everything late, and the computation late too."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stronghold.device import CpuDevice, Event, Stream
from stronghold.native import Disk, Priority, Transfer


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

    def draw(self, stream: str) -> float:
        longest = self.longest_s.get(stream, 0.0)
        return self._random.uniform(0.2, 1.0) * longest if longest else 0.0

    def sleep(self, stream: str) -> None:
        if delay_s := self.draw(stream):
            time.sleep(delay_s)


class Apart(CpuDevice):
    """A device whose memory is not the host's, as far as the store can see."""

    is_host = False


class DelayedDevice(CpuDevice):
    """The CPU whose streams are late, and whose computation lags behind the thread that issues it.

    Autograd computes at once, in the caller's thread. What a GPU would still be doing is played by a stream of its
    own: copies within the computation happen there, late, and a computation ends there, late, with a check that
    nobody has overwritten what it reads. ``record_event`` is behind all of that, as an event on a CUDA stream would be.
    """

    is_host = False

    def __init__(self, seed: int = 0, **longest_s: float) -> None:
        self.delays = Delays(seed, **longest_s)
        self.races: list[str] = []
        super().__init__()
        self.lag = self.stream("compute")
        self.iterations = self.stream("beside")

    def stream(self, name: str) -> Stream:
        return DelayedStream(name, self.delays)

    def host_stream(self, name: str) -> Stream:
        return self.stream(name)

    def compute_wait(self, event: Event) -> None:
        self.lag.wait(event)
        event.wait()

    def record_event(self) -> Event:
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

    def beside(self, task) -> Event:
        self.iterations.run(task)
        return self.iterations.record()

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        for buffer in reads:
            before = buffer.clone()

            def check(buffer: Tensor = buffer, before: Tensor = before) -> None:
                if not torch.equal(buffer, before):
                    self.races.append("a slot was overwritten while a computation still read it")

            self.lag.run(check)

    def settle(self) -> None:
        """Waits until all streams have done what they were given, and raises RaceError for what was seen."""
        for stream in (self.reads, self.fetches, self.root, self.gradients, self.updates, self.iterations, self.lag):
            stream.record().wait()
        if self.races:
            raise RaceError(f"{len(self.races)} races: {self.races[0]}")


class DelayedDisk(Disk):
    """A disk whose transfers end late, and which sees whether two of the same bytes are under way, one a write."""

    def __init__(self, device: DelayedDevice) -> None:
        super().__init__()
        self.device = device
        self._lock = threading.Lock()
        self._under_way: list[tuple[str, int, int, bool, _LateTransfer]] = []

    def _submit(self, file, write, memory, offset, priority, sums, verify):
        begin, end = offset, offset + memory.nbytes
        with self._lock:
            self._under_way = [entry for entry in self._under_way if not entry[-1].done()]
            for path, other_begin, other_end, other_write, _ in self._under_way:
                if path == file.path and begin < other_end and other_begin < end and (write or other_write):
                    self.device.races.append("a file was written where another transfer was under way")
            transfer = super()._submit(file, write, memory, offset, priority, sums, verify)
            weights = not write and priority < Priority.PREFETCH
            late = _LateTransfer(transfer, self.device.delays.draw("weights" if weights else "disk"))
            self._under_way.append((file.path, begin, end, write, late))
        return late


class _LateTransfer:
    def __init__(self, transfer: Transfer, delay_s: float) -> None:
        self.transfer = transfer
        self.end_s = time.monotonic() + delay_s

    def done(self) -> bool:
        return time.monotonic() >= self.end_s and self.transfer.done()

    def wait(self) -> bool:
        time.sleep(max(0.0, self.end_s - time.monotonic()))
        return self.transfer.wait()
