"""Notices when one of the processes has died or hangs, so that the others do not wait for it."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch.distributed as dist

from stronghold.device import finish_streams
from stronghold.distributed.activity import Others, Spent, has_worked, identity, spent, spent_by_children
from stronghold.distributed.gloo_threads import wait_for_gloo
from stronghold.distributed.lost import in_one_line, kill_stopped
from stronghold.distributed.machine import this_machine
from stronghold.errors import LostProcessError

BEAT_S = 1.0
LOST_S = 20.0
"""Without a sign of life for so long a process is lost: killed, stopped, or its machine is gone."""
STUCK_S = 40.0
"""A process that others wait for, and that has not computed, read or written anything for so long, hangs.

Nor have its children, which load data or are waited for.
"""
STILL_S = 5.0
"""One of this machine that is not heard of, for it holds Python's lock, computes if it has within so long."""
ENDED_S = 3.0
"""A process that has waited for so long for one that has ended waits for nothing: what that one sent has arrived."""
_IDLE = 0.02
"""The share of a core below which a process does nothing."""


@dataclass(frozen=True)
class _Wait:
    """That a thread waits for other processes: for those of ``ranks``, all where that is None."""

    since: float
    ranks: frozenset[int] | None

    def concerns(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


class Watch:
    """One process's signs of life in the store that all of them share, and its look at the others'.

    A thread of its own ends this process, with one error in the process that is to tell it, where another one is lost
    or this one hangs. The main thread, where a connection breaks, asks :meth:`explained` for the reason.
    """

    def __init__(self, store: dist.Store, rank: int, count: int, local_ranks: Collection[int]) -> None:
        self._store = store
        self._rank = rank
        self._count = count
        self._local_ranks = frozenset(local_ranks)
        """The processes on this machine, with this one."""
        self._waiting: _Wait | None = None
        """What the main thread waits for."""
        self._beside: dict[int, _Wait] = {}
        """What other threads of this process wait for, by the thread."""
        self._ending: LostProcessError | None = None
        """The error, on its way, that says which process is lost."""
        self._ended = False
        """Whether the thread has told why this process ends, and is about to end it."""
        self._told = False
        """Whether this process has an error of its own, which it tells."""
        self._claimed = threading.Lock()
        """Taken for good by who tells of a lost process: a thread that waited for it, or the watch's own.

        Not one that a thread may take twice: a thread has the number of one that has ended.
        """
        self._done = False
        """Whether it has ended in good order."""
        self.all_know = False
        """Whether, in what all run together, all processes know that one has failed: nobody waits to hear it again."""
        self._together = 0
        self._alone: Counter[str] = Counter()
        """How often, by what it is called, one process has done something alone for which others may wait."""
        self._said_s = float("-inf")
        """When this process last said that it has."""
        self._main = threading.main_thread()
        self._process = psutil.Process()
        self._beats: dict[int, tuple[list[str], float]] = {}
        """The last sign of life of each other process, and when it was seen.

        It is a count, whether the process waits, whether it has told of an error, and whether it is done.
        """
        self._seen: set[str] = set()
        """What the store is known to have."""
        self._count_beats = 0
        self._last_active = time.monotonic()
        self._spent = Spent(0.0)
        self._by_children: tuple[dict[int, Spent], float] = {}, 0.0
        """What each child had spent, and when that was seen."""
        self._others = Others(STILL_S)
        self._store_gone_since: float | None = None
        self._set("who", f"{socket.gethostname()}, process id {os.getpid()}")
        self._set("process", repr(identity(self._process)))
        atexit.register(self._leave)
        sys.excepthook = in_one_line(sys.excepthook)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, ranks: Collection[int] | None = None) -> Iterator[None]:
        """Says that the main thread waits for other processes inside; what breaks there is explained.

        It waits for those of ``ranks``, or for all: others may end meanwhile.
        """
        before, self._waiting = self._waiting, _wait_for(ranks)
        try:
            yield
        except RuntimeError as error:
            raise self.explained(error) from error
        finally:
            self._waiting = before

    @contextmanager
    def beside(self, ranks: Collection[int] | None = None) -> Iterator[None]:
        """Says that a thread beside the main one waits for other processes inside; what breaks is explained."""
        thread = threading.get_ident()
        self._beside[thread] = _wait_for(ranks)
        try:
            yield
        except RuntimeError as error:
            raise self.explained(error) from error
        finally:
            del self._beside[thread]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Says that all processes run what is inside, which may have others like it inside."""
        self.all_know = self.all_know and self._together > 0
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1

    @contextmanager
    def working(self) -> Iterator[None]:
        """Says that it does not, inside, where it otherwise waits; what fails here is this process's own."""
        before, self._waiting = self._waiting, None
        try:
            yield
        except BaseException as error:
            self.tell()
            self.fail(str(error) or type(error).__name__)
            raise
        finally:
            self._waiting = None if before is None else replace(before, since=time.monotonic())

    def tell(self) -> None:
        """Says that this process ends with an error of its own, so that the others need not tell of it."""
        if not self._told:
            self._told = True
            self._beat(time.monotonic())

    def fail(self, text: str) -> None:
        """Says what has failed here, for the case that the others wait elsewhere and never hear of it."""
        self._set("failed", text)

    def next_alone(self, name: str) -> str:
        """Returns a name for what one process does alone: the same in all that ask as often for ``name``."""
        self._alone[name] += 1
        return f"alone-{zlib.crc32(name.encode())}-{self._alone[name]}"

    def say(self, name: str, failed: str) -> None:
        """Says that this process has done what has this ``name``, or why it has ``failed``; nobody needs to listen."""
        self._set(name, failed)
        self._said_s = time.monotonic()

    def heard(self, rank: int, name: str) -> str:
        """Waits until process ``rank`` has said so; returns why it has failed, if it has."""
        while (failed := self._get(rank, name)) is None:  # this process ends where that one is lost
            time.sleep(BEAT_S / 50)
        return failed

    def is_ours(self) -> bool:
        """Whether this process, which ends with an error, is the first of those that do: all may have the same."""
        self.tell()
        if self._rank:
            self.linger()
        return not any(self._has_told(rank) for rank in range(self._rank))

    def linger(self) -> None:
        """Waits until all have seen how this process stands: a launcher kills the others when the first one ends."""
        time.sleep(3 * BEAT_S)

    def explained(self, error: Exception) -> Exception:
        """Returns what to raise for ``error``: a LostProcessError where another process has ended."""
        while self._ended:  # what breaks now is the end of others, for the same reason
            time.sleep(BEAT_S)
        if self._told or isinstance(error, LostProcessError):
            return error
        deadline, limit_s = time.monotonic() + LOST_S, 6 * BEAT_S
        while time.monotonic() < deadline:
            if (lost := self._lost(limit_s)) is not None:
                return self._error_of(lost, limit_s)
            time.sleep(BEAT_S / 4)
        self.tell()
        return error

    def _error_of(self, lost: int, limit_s: float) -> LostProcessError:
        """Returns the one error that says so to all threads, whose own may wait for one another's end."""
        while self._ending is None:
            if not self._claimed.acquire(timeout=BEAT_S):
                continue  # another thread is about to say so, or the watch's tells and ends this process
            try:
                self._ending = LostProcessError(self._message(lost), ours=self._is_to_tell(lost, limit_s))
            except BaseException:  # Ctrl-C: nobody would end the wait of others
                self._claimed.release()
                raise
        return self._ending

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            self._beat(now)
            self._look(now)
            lost = None if self._told or self._ending else self._lost(LOST_S)
            if lost is not None and self._claimed.acquire(blocking=False):
                self._end(self._message(lost) if self._is_to_tell(lost, LOST_S) else None, lost)
            if self._is_deadlock(now):
                self._end(self._why_deadlock() if self._rank == 0 else None)
            if self._is_stuck(now):
                self.tell()
                self._end(
                    f"process {self._rank} hangs: it has not computed, read or written anything for {STUCK_S:.0f} s, "
                    f"and others wait for it; it is in {self._where()}. Start again, with --resume from the last "
                    "checkpoint"
                )

    def _beat(self, now: float) -> None:
        self._count_beats += 1
        waits = any(now - wait.since >= STUCK_S / 2 for wait in self._waits())
        self._set("beat", f"{self._count_beats} {int(waits)} {int(self._told)} {int(self._done)}")

    def _waits(self) -> list[_Wait]:
        """Returns what threads of this process wait for."""
        main = self._waiting
        return [*([] if main is None else [main]), *list(self._beside.values())]

    def _leave(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # the exception that ends the interpreter
            self.tell()
        if self._told:
            self.linger()  # the store may be this process's, and end with it
        else:
            finish_streams()  # replicas wait for the updates of the last step, from which this process is not gone yet
            time.sleep(max(0.0, self._said_s + BEAT_S - time.monotonic()))  # the store may end with this process
        self._done = True
        self._beat(time.monotonic())
        self._over.set()  # a thread in the store while the interpreter ends would end it badly
        self._thread.join()
        wait_for_gloo()

    def _look(self, now: float) -> None:
        """Takes in the others' signs of life, and one's own activity."""
        for rank in range(self._count):
            if rank == self._rank:
                continue
            beat = (self._get(rank, "beat") or "").split()
            if rank not in self._beats or (beat and beat != self._beats[rank][0]):
                self._beats[rank] = beat, now
        own = spent(self._process)
        own = own._replace(computed_s=own.computed_s - time.thread_time())
        before_s, before_bytes, _ = self._spent
        if own.computed_s - before_s > _IDLE * BEAT_S or own.moved_bytes != before_bytes:
            self._last_active = now
        elif now - self._last_active > STUCK_S / 4:  # to look for children takes longer
            (before, since), found = self._by_children, spent_by_children(self._process)
            self._by_children = found, now
            if any(has_worked(before[child], found[child], now - since) for child in found.keys() & before.keys()):
                self._last_active = now
        self._spent = own

    def _lost(self, limit_s: float) -> int | None:
        """Returns the first process that has not been heard of for so long, and has not ended by itself."""
        now = time.monotonic()
        if self._store_gone_since is not None:
            # The store is process 0's, or the launcher's: with nobody waiting it may be the orderly end.
            overdue = bool(self._waits()) and now - self._store_gone_since > limit_s
            return 0 if overdue and self._rank else None
        for rank, (_, seen) in sorted(self._beats.items()):
            if now - seen > limit_s and not self._is_done(rank) and not self._is_at_work(rank, now):
                return rank
        waits = self._waits()
        for rank, (_, seen) in sorted(self._beats.items()):
            if self._is_done(rank) and any(w.concerns(rank) and now - max(seen, w.since) > ENDED_S for w in waits):
                return rank
        return None

    def _is_at_work(self, rank: int, now: float) -> bool:
        return rank in self._local_ranks and self._others.works(self._get(rank, "process"), now)

    def _is_stuck(self, now: float) -> bool:
        others_wait = any(beat[1:2] == ["1"] for beat, _ in self._beats.values())
        return not self._waits() and others_wait and now - self._last_active > STUCK_S

    def _why_deadlock(self) -> str:
        for rank in range(self._count):
            if (text := self._get(rank, "failed")) is not None:
                return f"process {rank} failed: {text}"
        return (
            f"all processes wait for one another, and none has computed, read or written anything for {STUCK_S:.0f} s; "
            f"this one is in {self._where()}. They must call the same in the same order, with data that take the same "
            "way through the model"
        )

    def _is_deadlock(self, now: float) -> bool:
        others = [beat for beat, _ in self._beats.values()]
        all_wait = bool(others) and all(beat[1:2] == ["1"] for beat in others)
        return bool(self._waits()) and all_wait and now - self._last_active > STUCK_S

    def _is_to_tell(self, lost: int, limit_s: float) -> bool:
        """Whether this is the process to tell of a ``lost`` one: the first that is left, unless that one has itself.

        Others may have been lost with it, within two beats of the ``limit_s`` that it has not been heard of. Where the
        store is, it is the first on each machine.
        """
        left = set(range(self._count)) - {lost}
        if self._store_gone_since is None:
            since = time.monotonic() - (limit_s - 2 * BEAT_S)
            left -= {rank for rank, (_, seen) in self._beats.items() if seen < since and not self._is_done(rank)}
        else:  # whether others are left cannot be known: their machine may be gone
            left &= self._local_ranks
        first = min(left)
        return not self._has_told(lost) and self._rank == first

    def _has_told(self, rank: int) -> bool:
        return rank in self._beats and self._beats[rank][0][2:3] == ["1"]

    def _is_done(self, rank: int) -> bool:
        return self._beats[rank][0][3:4] == ["1"]

    def _message(self, lost: int) -> str:
        who = self._get(lost, "who")
        named = f"process {lost} ({who})" if who else f"process {lost}"
        if lost in self._beats and self._is_done(lost):
            return (
                f"{named} has ended by itself, without an error, and others wait for it: it took fewer steps, or left "
                "out what all must call; give all processes as many batches, and end the loop of all at the same step"
            )
        return (
            f"{named} is lost: it was killed or stopped, or its machine or network is gone; see what ended it "
            "(out of memory?), and start again, with --resume from the last checkpoint"
        )

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main.ident or 0)
        last = traceback.extract_stack(frame)[-1] if frame is not None else None
        return "an unknown place" if last is None else f"{last.filename}:{last.lineno}, {last.name}"

    def _end(self, message: str | None, lost: int | None = None) -> None:
        self._ended = True
        if message is not None:
            os.write(2, f"stronghold: error: {message}\n".encode())
            if lost in self._local_ranks:
                kill_stopped(self._get(lost, "process"))
        self.linger()
        os._exit(1)  # the main thread waits where no exception reaches it

    def _set(self, name: str, value: str) -> None:
        self._with_store(lambda: self._store.set(f"{name}/{self._rank}", value))

    def _get(self, rank: int, name: str) -> str | None:
        key = f"{name}/{rank}"

        def get() -> str | None:
            if key not in self._seen:
                if not self._store.check([key]):  # a get would wait for it
                    return None
                self._seen.add(key)
            return self._store.get(key).decode()

        return self._with_store(get)

    def _with_store(self, action: Callable[[], str | None]) -> str | None:
        if self._store_gone_since is not None:
            return None
        try:
            return action()
        except RuntimeError:  # dist.DistError: whoever had the store has ended
            self._store_gone_since = time.monotonic()
            return None


def _wait_for(ranks: Collection[int] | None) -> _Wait:
    return _Wait(time.monotonic(), None if ranks is None else frozenset(ranks))


_watch: Watch | None = None


def watch_over(rank: int, count: int) -> Watch:
    """Returns this process's watch; there is one for all that it trains."""
    global _watch
    if _watch is None:
        # Of each process a new name, for a launcher's store outlives a restart, and what it then holds is of dead ones.
        everyone: list[tuple[str, tuple[str, str]]] = [("", ("", ""))] * count
        dist.all_gather_object(everyone, (uuid.uuid4().hex, this_machine()))
        local_ranks = [other for other, (_, machine) in enumerate(everyone) if machine == everyone[rank][1]]
        # A connection of its own: the thread must not hold up the main one.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        _watch = Watch(dist.PrefixStore(everyone[0][0], store), rank, count, local_ranks)
    return _watch


def joined() -> Watch | None:
    """Returns this process's watch, None where it has not joined others."""
    return _watch
