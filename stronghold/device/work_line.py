"""What a stream has to do, in order, and who carries it out: its thread, or whoever gives it."""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from stronghold.device.events import givers

Task = Callable[[], None]
Fail = Callable[[BaseException], None]
"""Tells those who wait for a task why it was not carried out."""
AtOnce = Callable[[], bool]
"""Whether a task takes no time now: it only gives a device work, and waits for nothing on the host."""


def never_at_once() -> bool:
    return False


class QueuedTask(NamedTuple):
    task: Task
    fail: Fail | None
    at_once: AtOnce


class WorkLine:
    """What a stream's thread has to do, in order. The thread holds this alone, and so ends with its stream."""

    def __init__(self) -> None:
        self.tasks: collections.deque[QueuedTask] = collections.deque()
        self.wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.ended: BaseException | None = None
        """Why no thread carries out what is left, or what is still to come."""
        self._turn = threading.RLock()
        """Whoever carries tasks out holds it."""

    def add(self, task: Task, at_once: AtOnce) -> None:
        """Puts ``task`` behind the others; nobody waits for it itself."""
        self.tasks.append(QueuedTask(task, None, at_once))

    def give(self, task: Task, fail: Fail, at_once: AtOnce) -> None:
        """Puts ``task`` behind the others and has all carried out; where the thread has ended, ``fail`` is called.

        To wake the thread takes longer than to give a device a copy, and it then takes Python's lock from the giver: if
        it has nothing to do and the tasks take no time, the giver carries them out.
        """
        self.tasks.append(QueuedTask(task, fail, at_once))
        if at_once is never_at_once or self.ended is not None or not self._carry_out_at_once():
            self.wakes.put(True)
        # Asked behind the append: a thread that ends meanwhile either sees the task or has said before that it ended.
        if self.ended is not None:
            self.end(self.ended)

    def carry_out(self) -> None:
        """Carries all tasks out, in the stream's thread."""
        with self._turn:
            while self.tasks:
                self.tasks.popleft().task()  # a finished task keeps no buffer alive while the thread waits

    def _carry_out_at_once(self) -> bool:
        """Carries out, in the giver's thread, the tasks before the first that takes time; returns whether all are."""
        if self._turn._is_owned():  # type: ignore[attr-defined]
            return False  # a signal came while this thread was at it, and what it called gives the stream work
        giver = threading.get_ident()
        try:  # before the lock is taken: a signal may come as soon as it is
            if not self._turn.acquire(blocking=False):
                return False  # the thread is at it, and may have looked for the last time
            givers.add(giver)
            with torch.no_grad():
                while self.tasks:
                    if not self.tasks[0].at_once():
                        return False
                    self.tasks[0].task()
                    self.tasks.popleft()
            return True
        except IndexError:  # the thread has ended meanwhile, and what was left has failed
            return True
        except BaseException:  # Ctrl-C: the thread carries the task out, which may be given to a device twice
            self.wakes.put(True)
            raise
        finally:
            # Python looks for signals behind a call, and these calls have had their effect by then. To ask first
            # whether the turn was taken would be one more: a signal behind that would leave the turn taken for good.
            try:
                givers.discard(giver)
            finally:
                try:  # noqa: SIM105 - a call for it would come first
                    self._turn.release()
                except RuntimeError:
                    pass  # it was not taken

    def end(self, cause: BaseException) -> None:
        """Says that the thread has ended; what it has not carried out fails."""
        self.ended = cause
        while self.tasks:
            try:
                fail = self.tasks.popleft().fail
            except IndexError:  # another thread took the last one
                return
            if fail is not None:
                fail(cause)
