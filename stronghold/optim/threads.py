"""How many threads an update on the host takes: as many as asked for, or measured while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from stronghold.native import Segment

TRIES = 3
"""Calls of the kernel for each number; the fastest counts, for other work can only slow one down."""
WITHIN = 1.03
"""What the chosen number may take of the fastest one's time."""
LEAST_BYTES = 4 * 2**20
"""For each thread: a shorter call says more of the threads' waking up than of memory."""


class Threads:
    """The number of threads of the kernel's calls, which changes no bit of what they compute.

    What updates the host's memory is bound by that memory, which few cores keep busy; each further one is taken from
    the thread that launches kernels, the data loader and the copies. Where it is to be ``measured``, the first calls
    from the second step on (the first one also touches the moments for the first time) try numbers between 1 and
    ``most`` by bisection, three calls each: at most 15 calls up to 15 threads. It stays with the least number that
    takes at most 3 % longer than the fastest. The calls that are tried are those of the training, beside what runs
    beside them, so that nothing is computed or allocated for it. Else it is ``most`` throughout.
    """

    def __init__(self, most: int, *, measured: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.count = most
        """The least number that is known to be fast enough."""
        self._most = most
        self._clock = clock
        self._too_few = 0
        self._trying: int | None = most if measured and most > 1 else None
        self._tries_s: list[float] = []
        """Seconds per byte of the calls with the number that is being tried."""
        self._best_s = float("inf")

    def run(self, kernel: Callable[[int], None], segments: Sequence[Segment]) -> None:
        """Calls ``kernel`` with the number of threads to update ``segments`` with."""
        trying, size = self._trying, 0
        if trying is not None and all(segment.step > 1 for segment in segments):
            size = sum(map(_bytes_of, segments))
        if trying is None or size < LEAST_BYTES * self._most:
            kernel(self.count)
            return
        begin_s = self._clock()
        kernel(trying)
        self._tries_s.append((self._clock() - begin_s) / size)
        if len(self._tries_s) == TRIES:
            self._judge(trying, min(self._tries_s))
            self._tries_s = []

    def _judge(self, tried: int, took_s: float) -> None:
        self._best_s = min(self._best_s, took_s)
        if took_s <= WITHIN * self._best_s:
            self.count = tried
        else:
            self._too_few = tried
        middle = (self._too_few + self.count) // 2
        self._trying = middle if middle > self._too_few else None


def _bytes_of(segment: Segment) -> int:
    """Returns how long the tensors are that an update reads, but for an 8-bit moment's exponents."""
    moments = (
        moment if isinstance(moment, Tensor) else moment.codes for moment in (segment.exp_avg, segment.exp_avg_sq)
    )
    others = (segment.weight, segment.remainder, segment.grad, segment.grad_remainder)
    return sum(tensor.nbytes for tensor in (*moments, *others) if tensor is not None)
