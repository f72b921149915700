"""A stream on the host: a thread that carries out its work in the order it was given."""

from __future__ import annotations

import atexit
import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from stronghold.device.events import Event
from stronghold.device.timeline import Stamp

Task = Callable[[], None]


class Stream:
    """Work in order, beside the thread that gives it: copies, waits, events and functions.

    The same class serves both devices. On the CPU its thread does the copying; on CUDA the thread issues copies to a
    CUDA stream, because only a thread can wait for the host's updates before it issues the next one. After a failure
    nothing more is done and every event recorded from then on fails with the first error.

    To wake the thread costs both more than a small copy does. Copies and waits are there for the event that is
    recorded behind them, and begin with it at the latest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._tasks: collections.deque[Task] = collections.deque()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks, self._wakes, name), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._wakes.put, False).atexit = False
        _open.add(self)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source`` to ``target``, of the same shape and dtype; the buffers are the caller's to guard."""
        self._queue(lambda: self._copy(target, source))

    def wait(self, event: Event) -> None:
        """Makes the work given from now on wait for ``event``."""
        if not self._is_past(event):
            self._queue(lambda: self._wait(event))

    def hold(self, event: Event) -> None:
        """The same for work that the host does: its thread waits."""
        if not self._is_past(event):
            self._queue(lambda: self._hold(event))

    def run(self, task: Task, moved_bytes: int = 0) -> None:
        """Runs ``task``, which moves about ``moved_bytes`` through the host's memory."""
        self.submit(task)

    def compute(self, task: Task) -> None:
        """Runs ``task``, which works on device memory, in the order of the copies."""
        self.submit(task)

    def record(self) -> Event:
        """Returns an event that happens when all work given before it is done."""
        event = self._new_event()

        def happen() -> None:
            if self._error is not None:
                event.fail(self._error)
            else:
                self._happen(event)

        self._give(happen)
        return event

    def stamp(self) -> Stamp:
        """Returns the time at which the work given before it is done, on the clock of the device or of the host."""
        stamp = Stamp()
        self._give(lambda: stamp.put(self._now()))
        return stamp

    def submit(self, task: Task) -> None:
        """Runs ``task``, in order."""
        self._queue(task)
        self._wakes.put(True)

    def _give(self, task: Task) -> None:
        """Runs ``task`` whether the work before it has failed or not."""
        self._tasks.append(task)
        self._wakes.put(True)

    def _queue(self, task: Task) -> None:
        """Puts ``task`` behind the others, unless one of them has failed by then; it does not wake the thread."""

        def guarded() -> None:
            if self._error is None:
                try:
                    task()
                except BaseException as error:
                    self._error = error

        self._tasks.append(guarded)

    def _is_past(self, event: Event) -> bool:
        """Whether there is nothing to wait for."""
        return event.passed

    def _new_event(self) -> Event:
        return Event()

    def _now(self) -> object:
        return time.perf_counter()

    def _happen(self, event: Event) -> None:
        event.happen()

    def _wait(self, event: Event) -> None:
        self._hold(event)

    def _hold(self, event: Event) -> None:
        event.wait()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


_open: weakref.WeakSet[Stream] = weakref.WeakSet()
_LAST_WORK_S = 60.0
"""How long the end of the process waits for work under way, such as the updates of the last step."""


@atexit.register
def finish_streams() -> None:
    """Waits for the work that all streams have been given, and ends them: at the end of the process."""
    # A thread that is inside an update when the interpreter goes away would take the process with it.
    streams = list(_open)
    for stream in streams:
        stream._wakes.put(False)
    deadline = time.monotonic() + _LAST_WORK_S
    for stream in streams:
        stream._thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: collections.deque[Task], wakes: queue.SimpleQueue[bool], name: str) -> None:
    threading.current_thread().name = f"stronghold-{name}"
    with torch.no_grad():
        while wakes.get():
            while tasks:
                tasks.popleft()()  # a finished task keeps no buffer alive while the thread waits for the next
