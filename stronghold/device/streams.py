"""A stream on the host: a thread that carries out its work in the order it was given."""

from __future__ import annotations

import atexit
import threading
import time
import weakref

import torch
from torch import Tensor

from stronghold.device.events import Event, check_not_at_once
from stronghold.device.forks import check_process, forks
from stronghold.device.timeline import Stamp
from stronghold.device.work_line import AtOnce, Fail, Task, WorkLine, never_at_once
from stronghold.errors import OffloadedModelError


class Stream:
    """Work in order, beside the thread that gives it: copies, waits, events and functions.

    On the CPU its thread does the copying; on an accelerator it issues copies to a stream of the device, because only a
    thread can wait for the host's updates before it issues the next one. After a failure nothing more is done and every
    event recorded from then on fails with the first error. An event, or a stamp, that cannot happen fails as well:
    where recording itself raises, and where there is no thread any more.

    To wake the thread costs both more than a small copy does. Copies and waits are there for the event that is
    recorded behind them, and begin with it at the latest. What only gives a device work is done by the thread that
    gives it, where the stream's has nothing to do. A child of fork has not got the thread: to give it work there
    raises OffloadedModelError.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._born = forks()
        self._error: BaseException | None = None
        self._ended = False
        self._line = WorkLine()
        self._thread = threading.Thread(target=_work, args=(self._line, name), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._line.wakes.put, False).atexit = False
        _open.add(self)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source`` to ``target``, of the same shape and dtype; the buffers are the caller's to guard."""
        self._queue(lambda: self._copy(target, source), lambda: self._copies_at_once(target, source))

    def wait(self, event: Event) -> None:
        """Makes the work given from now on wait for ``event``."""
        if not self._is_past(event):
            self._queue(lambda: self._wait(event), lambda: self._waits_at_once(event))

    def synchronize(self, event: Event) -> None:
        """The same for work that the host does: its thread waits."""
        if not self._is_past(event):
            self._queue(lambda: self._block_on(event))

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

        self._give(happen, event.fail, self._records_at_once)
        return event

    def stamp(self) -> Stamp:
        """Returns the time at which the work given before it is done, on the clock of the device or of the host."""
        stamp = Stamp()
        self._give(lambda: stamp.put(self._now()), stamp.fail, self._records_at_once)
        return stamp

    def submit(self, task: Task) -> None:
        """Runs ``task``, in order."""
        self._queue(task)
        self.wake()

    def wake(self) -> None:
        """Has the thread begin with what was given so far."""
        self._line.wakes.put(True)

    def end(self) -> None:
        """Has what was given carried out, and the thread ended then; returns before."""
        if not self._ended:
            self._ended = True
            self.wake()
            self._line.wakes.put(False)

    def drain(self) -> None:
        """Blocks until what was given is done, failed or not, and of a stream that was ended its thread is gone."""
        if not self._ended:
            check_not_at_once()
            done = threading.Event()
            self._give(done.set, lambda _: done.set())
            done.wait()
            return
        self._thread.join()
        self._error = None  # its traceback refers to what the work was done with

    def is_thread(self, thread: threading.Thread) -> bool:
        """Whether the work is done by ``thread``."""
        return thread is self._thread

    def _give(self, task: Task, fail: Fail, at_once: AtOnce = never_at_once) -> None:
        """Runs ``task`` whether the work before it has failed or not; calls ``fail`` where it cannot be done."""
        check_process(self._born)
        self._check_open()

        def guarded() -> None:
            try:
                task()
            except BaseException as error:
                self._raise_interruption(error)
                self._error = self._error or error
                fail(error)

        self._line.give(guarded, fail, at_once)

    def _raise_interruption(self, error: BaseException) -> None:
        """Raises what a signal brought to the thread that gave the work: it has nothing to do with that."""
        if not isinstance(error, Exception) and not self.is_thread(threading.current_thread()):
            raise error

    def _check_open(self) -> None:
        if self._ended:
            raise OffloadedModelError(
                f"the model was closed, or is gone, and nothing can be given to its {self.name} any more; build and "
                "offload it anew"
            )

    def _queue(self, task: Task, at_once: AtOnce = never_at_once) -> None:
        """Puts ``task`` behind the others, unless one of them has failed by then; it does not wake the thread."""
        check_process(self._born)

        def guarded() -> None:
            if self._error is None:
                try:
                    task()
                except BaseException as error:
                    self._raise_interruption(error)
                    self._error = error

        self._check_open()
        self._line.add(guarded, at_once)

    def _records_at_once(self) -> bool:
        return False

    def _copies_at_once(self, target: Tensor, source: Tensor) -> bool:
        return False

    def _waits_at_once(self, event: Event) -> bool:
        return False

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
        self._block_on(event)

    def _block_on(self, event: Event) -> None:
        event.wait()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


_open: weakref.WeakSet[Stream] = weakref.WeakSet()
_LAST_WORK_S = 60.0  # that the end of the process waits for work under way, such as the updates of the last step


@atexit.register
def finish_streams() -> None:
    """Waits for the work that all streams have been given, and ends them: at the end of the process."""
    # A thread that is inside an update when the interpreter goes away would take the process with it.
    streams = list(_open)
    for stream in streams:
        stream._line.wakes.put(False)
    deadline = time.monotonic() + _LAST_WORK_S
    for stream in streams:
        stream._thread.join(max(0.0, deadline - time.monotonic()))


def _work(line: WorkLine, name: str) -> None:
    threading.current_thread().name = f"stronghold-{name}"
    try:
        with torch.no_grad():
            while line.wakes.get():
                line.carry_out()
    except BaseException as error:
        line.end(error)
        raise
    line.end(RuntimeError(f"the stream {name!r} has ended with its process, or with the model that it worked for"))
