"""Who tells that a process is lost, where the store of the signs of life is lost with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from stronghold.distributed import watch
from stronghold.distributed.activity import Spent, identity
from stronghold.errors import LostProcessError


class Gone(dist.Store):
    """A store whose process has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(("rank", "local_ranks", "tells"), [(1, [0, 1], True), (2, [2, 3], True), (3, [2, 3], False)])
def test_the_first_on_each_machine_tells_of_the_store_s(monkeypatch, rank, local_ranks, tells):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own = watch.Watch(Gone(), rank, 4, local_ranks)
    with pytest.raises(LostProcessError, match="process 0 is lost") as lost, own.waiting():
        raise RuntimeError("Connection closed by peer")
    assert lost.value.ours is tells


class Kept(dist.Store):
    """A store in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


@pytest.mark.parametrize("at_once", [True, False])
def test_all_threads_that_wait_for_a_lost_process_have_the_error_that_says_so(monkeypatch, at_once):
    """A stream's thread may be told first, and the main thread wait for what that does.

    One that begins when another has ended may have its number.
    """
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own, found = watch.Watch(Gone(), 1, 2, [0, 1]), list[BaseException]()

    def wait() -> None:
        try:
            with own.beside():
                raise RuntimeError("Connection closed by peer")
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join(20)
    for thread in threads:
        thread.join(20)
    assert len(found) == 3, "a thread waits for ever"
    assert isinstance(found[0], LostProcessError) and all(error is found[0] for error in found)


def test_ctrl_c_while_the_error_is_made_leaves_no_thread_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own = watch.Watch(Gone(), 1, 2, [0, 1])
    own._over.set()  # its thread would claim what is free again
    own._thread.join()

    def interrupted(lost):
        raise KeyboardInterrupt  # a signal may wait while other threads run

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), own.waiting():
        patched.setattr(own, "_message", interrupted)
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(LostProcessError, match="process 0 is lost"), own.waiting():
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(("alive", "tells"), [([], True), ([1], False), ([2], False)])
def test_of_several_that_are_lost_at_once_the_first_that_is_left_tells(monkeypatch, alive, tells):
    """As where memory runs out: process 1 is to tell of process 0, and may be gone with it."""
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    own, now = watch.Watch(Kept(), 3, 4, [0, 1, 2, 3]), time.monotonic()
    own._over.set()  # its thread would look for others
    own._thread.join()
    own._beats = {rank: (["1", "0", "0", "0"], now if rank in alive else now - 60) for rank in range(3)}
    assert own._is_to_tell(0, 20.0) is tells


COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(60)"
TICKS = "import time\nwhile True: sum(range(100_000)); time.sleep(0.5)"
"""As what logs, or looks after something, beside a run."""


@pytest.fixture
def run():
    """Starts programs, of which none is left."""
    started = []

    def start(code: str) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def silent(monkeypatch, process: subprocess.Popen, local_ranks: list[int]) -> watch.Watch:
    """Returns the watch of process 0 for which process 1, that runs, has not been heard of for a minute."""
    monkeypatch.setattr(watch, "STILL_S", 0.5)
    own = watch.Watch(Kept(), 0, 2, local_ranks)
    own._over.set()
    own._thread.join()
    own._store.set("process/1", repr(identity(psutil.Process(process.pid))))
    own._beats = {1: (["1", "0", "0", "0"], time.monotonic() - 60)}
    return own


def lost_within(own: watch.Watch, seconds: float) -> int | None:
    """Returns the process that is told to be lost as soon as there is one."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if (lost := own._lost(20.0)) is not None:
            return lost
        time.sleep(0.05)
    return None


def test_a_process_that_computes_and_lets_no_thread_say_so_is_not_lost(monkeypatch, run):
    process = run(COMPUTES)
    own = silent(monkeypatch, process, [0, 1])
    assert lost_within(own, 2.0) is None
    process.send_signal(signal.SIGSTOP)
    assert lost_within(own, 5.0) == 1
    process.send_signal(signal.SIGCONT)
    assert lost_within(own, 2.0) is None
    process.kill()
    process.wait()
    assert lost_within(own, 5.0) == 1


def test_one_that_does_nothing_is_lost_and_so_is_one_of_another_machine(monkeypatch, run):
    assert lost_within(silent(monkeypatch, run(SLEEPS), [0, 1]), 10.0) == 1
    assert lost_within(silent(monkeypatch, run(COMPUTES), [0]), 0.5) == 1


@pytest.mark.parametrize(("code", "works"), [(COMPUTES, True), (SLEEPS, False), (TICKS, False)])
def test_a_process_whose_children_compute_does_not_hang(monkeypatch, run, code, works):
    """They load its data, or it waits for what they do between two steps."""
    monkeypatch.setattr(watch, "STUCK_S", 1.0)
    own = watch.Watch(Kept(), 0, 2, [0, 1])
    own._over.set()
    own._thread.join()
    run(code)
    time.sleep(1.0)  # until it has begun
    monkeypatch.setattr(watch, "spent", lambda process: Spent(0.0))  # and this process does nothing else
    own._last_active, hung = time.monotonic(), False
    for _ in range(30):
        own._beats = {1: (["1", "1", "0", "0"], time.monotonic())}  # another one waits
        own._look(now := time.monotonic())
        hung |= own._is_stuck(now)
        time.sleep(0.1)
    assert hung is not works
