"""Streams on the host: order, waiting, failure, and the end of the process."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from stronghold.device import CpuDevice, Event, HostBuffer, Stream, Timeline, open_device
from stronghold.device.work_line import QueuedTask, never_at_once
from stronghold.errors import StrongholdError
from tests.crossed import seeds


def test_work_is_done_in_order_beside_the_thread_that_gives_it():
    stream, done, gate = Stream("test"), [], Event()
    stream.wait(gate)
    for i in range(5):
        stream.run(lambda i=i: done.append((i, threading.current_thread().name)))
    event = stream.record()
    assert not event.done
    assert done == []
    gate.happen()
    event.wait()
    assert done == [(i, "stronghold-test") for i in range(5)]


def test_streams_wait_for_one_another():
    first, second, target = Stream("first"), Stream("second"), torch.zeros(4)
    gate = Event()
    first.wait(gate)
    first.copy(target, torch.ones(4))
    second.wait(first.record())
    seen = []
    second.run(lambda: seen.append(target.clone()))
    gate.happen()
    second.record().wait()
    assert torch.equal(seen[0], torch.ones(4))


def test_a_failure_reaches_everyone_who_waits_and_nothing_more_is_done():
    first, second, done = Stream("first"), Stream("second"), []
    first.run(lambda: 1 / 0)
    first.run(lambda: done.append("after"))
    event = first.record()
    with pytest.raises(RuntimeError, match="background copy or update failed: division by zero") as caught:
        event.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    second.wait(event)
    with pytest.raises(RuntimeError, match="division by zero"):
        second.record().wait()
    assert done == []


def test_a_copy_of_another_shape_fails_as_a_copy_does():
    stream = Stream("test")
    stream.copy(torch.zeros(2), torch.zeros(3))
    with pytest.raises(RuntimeError, match="background copy or update failed"):
        stream.record().wait()


class Unrecordable(Stream):
    """A stream of a device that has failed: neither an event nor a time can be recorded in it."""

    def _happen(self, event: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _now(self) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def within(seconds: float, wait) -> BaseException:
    """Returns what ``wait`` raises; fails where it still waits after so many seconds."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for what cannot happen"
    assert len(caught) == 1
    return caught[0]


def test_an_event_that_cannot_be_recorded_fails_with_the_cause():
    stream, other, done = Unrecordable("test"), Stream("other"), []
    event = stream.record()
    stream.run(lambda: done.append("after"))
    other.wait(event)
    for waiting in (event.wait, stream.record().wait, other.record().wait):
        assert "an illegal memory access" in str(within(10, waiting))
    assert event.done
    assert not event.passed
    assert done == []


def test_a_time_that_cannot_be_told_fails_with_the_cause():
    device = CpuDevice()
    device.fetches = stream = Unrecordable("fetches")
    timeline = Timeline(device)
    with timeline.on(stream, "copies"):
        pass
    for waiting in (stream.stamp().get, timeline.spans, stream.record().wait):
        assert "an illegal memory access" in str(within(10, waiting))


def test_events_of_a_thread_that_has_died_fail(monkeypatch):
    """Whatever ends the thread from outside of a task: what it was given, and what it is given later, fails."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    stream, gate, entered = Stream("test"), Event(), threading.Event()
    stream.run(lambda: (entered.set(), gate.wait()))
    entered.wait(10)
    first, stamp = stream.record(), stream.stamp()
    stream._line.tasks.appendleft(QueuedTask(None, None, never_at_once))  # what the thread cannot call
    gate.happen()
    for waiting in (first.wait, stamp.get, stream.record().wait, stream.stamp().get):
        assert "background copy or update failed: 'NoneType' object is not callable" in str(within(10, waiting))
    assert not stream._thread.is_alive()


def test_an_error_raised_into_the_thread_reaches_those_who_wait():
    stream, gate, entered = Stream("test"), threading.Event(), threading.Event()

    def busy() -> None:
        entered.set()
        while not gate.wait(0.01):
            pass

    stream.run(busy)
    entered.wait(10)
    event = stream.record()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(stream._thread.ident), ctypes.py_object(SystemExit))
    assert "background copy or update failed: SystemExit" in str(within(10, event.wait))


class Interrupted(Stream):
    """Gives a device its work in the thread that asks for it, where Ctrl-C comes in the midst of one task."""

    comes_in = "copy"

    def _records_at_once(self) -> bool:
        return True

    def _copies_at_once(self, target, source) -> bool:
        return True

    def _copy(self, target, source) -> None:
        self._meet("copy")
        target.add_(source)

    def _happen(self, event) -> None:
        self._meet("record")
        super()._happen(event)

    def _meet(self, what: str) -> None:
        if self.comes_in == what:
            self.comes_in = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("comes_in", ["copy", "record"])
def test_ctrl_c_is_raised_where_it_comes_and_the_work_is_done_all_the_same(comes_in):
    stream, target = Interrupted("test"), torch.zeros(4)
    stream.comes_in = comes_in
    stream.copy(target, torch.ones(4))
    with pytest.raises(KeyboardInterrupt):
        stream.record()
    stream.copy(target, torch.ones(4))
    event = stream.record()
    stream.drain()
    assert event.passed
    assert target.tolist() == [2.0] * 4


def test_after_the_end_of_the_process_s_work_nobody_waits_for_ever():
    """What ran at exit behind the streams' end, such as an earlier library's handler, hung."""
    program = """
import atexit

def late():
    try:
        stream.record().wait()
    except RuntimeError as error:
        print(error)

atexit.register(late)
from stronghold.device import Stream
stream = Stream("fetches")
stream.record().wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the stream 'fetches' has ended with its process" in done.stdout


def test_a_child_of_fork_is_told_that_it_has_no_streams():
    program = """
import os
from stronghold.device import Stream
stream = Stream("fetches")
stream.record().wait()
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    stream.record().wait()
except BaseException as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""
    # Python tells from 3.12 on that a process with threads forks.
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    done = subprocess.run([*python, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("OffloadedModelError an offloaded model computes and is trained in the process")


def test_the_thread_ends_with_its_stream():
    stream = Stream("test")
    thread = stream._thread
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_finished_task_keeps_no_buffer_alive():
    stream, source = Stream("test"), torch.ones(3)
    alive = weakref.ref(source)
    stream.copy(torch.zeros(3), source)
    stream.record().wait()
    stream.record().wait()  # the copy's task has been dropped by now
    del source
    gc.collect()
    assert alive() is None


def test_views_have_storages_of_their_own_and_share_the_memory():
    buffer = HostBuffer(256)
    one, other = buffer.view(0, (4, 2), torch.float32), buffer.view(64, (3,), torch.bfloat16)
    buffer.flat.zero_()
    one.fill_(1)
    assert one.untyped_storage().nbytes() == 32
    assert other.untyped_storage().nbytes() == 6
    assert torch.equal(buffer.flat[:32].view(torch.float32), torch.ones(8))
    assert torch.equal(other, torch.zeros(3, dtype=torch.bfloat16))
    assert buffer.view(0, (0, 3), torch.float32).shape == (0, 3)


def test_devices_open_by_torchs_names():
    assert open_device("cpu").name == "cpu"
    assert open_device(torch.device("cpu")).torch_device == torch.device("cpu")
    device = CpuDevice()
    assert open_device(device) is device
    with pytest.raises(ValueError, match=r"device must be 'cpu', 'cuda\[:index\]' or .* \(got 'meta'; "):
        open_device("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is at hand")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(ValueError, match=r"needs a CUDA device .* pass device='cpu'"):
        open_device("cuda")


@pytest.mark.parametrize("number", seeds(3, 1))
def test_the_process_ends_cleanly_with_updates_under_way(number):
    """A thread that was inside an update when the interpreter went away took the process with it (SIGABRT)."""
    program = """
import torch, stronghold
model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(6)))
stronghold.offload(model, window=1, device="cpu")
optimizer = stronghold.AdamW(model.parameters())
model(torch.ones(1, 1500)).sum().backward()
optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), number


class Turn:
    """A lock with which Ctrl-C comes as soon as it is taken, once."""

    def __init__(self) -> None:
        self._lock, self._met = threading.RLock(), False
        self._is_owned, self.release = self._lock._is_owned, self._lock.release

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking=blocking)
        if not self._met:
            self._met = True
            raise KeyboardInterrupt
        return taken

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_ctrl_c_as_the_giver_takes_its_turn_leaves_the_turn_to_the_thread():
    stream, target = CpuDevice().fetches, torch.zeros(4)
    stream._line._turn = Turn()
    stream.copy(target, torch.ones(4))
    with pytest.raises(KeyboardInterrupt):
        stream.record()
    stream.record().wait()
    assert target.tolist() == [1, 1, 1, 1]


def test_a_signal_s_handler_that_waits_for_the_copy_it_has_interrupted_is_an_error(monkeypatch):
    """It waited for ever: only the thread that the handler runs in could go on with the copy."""
    stream, target = CpuDevice().fetches, torch.zeros(4)
    copy, met, found = stream._copy, [], []

    def handler(*_: object) -> None:
        stream.copy(target, torch.ones(4))
        for waits in (stream.record().wait, stream.drain):
            with pytest.raises(StrongholdError, match="signal's handler cannot wait") as caught:
                waits()
            found.append(caught)

    def interrupted(target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        if not met:
            met.append(signal.raise_signal(signal.SIGUSR1))

    monkeypatch.setattr(stream, "_copy", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        stream.copy(target, torch.ones(4))
        stream.record().wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(found) == 2
    assert target.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("elements", [4, 1 << 20])
def test_small_copies_are_the_giver_s_where_nothing_is_before_them(elements, monkeypatch):
    stream, gate, threads = CpuDevice().fetches, Event(), []
    copy = stream._copy
    monkeypatch.setattr(stream, "_copy", lambda *both: (threads.append(threading.current_thread()), copy(*both)))
    source, target = torch.ones(elements), torch.zeros(elements)
    stream.copy(target, source)
    stream.record().wait()
    stream.wait(gate)
    stream.copy(source, target)
    event = stream.record()
    assert len(threads) == 1 and not event.done  # it is behind what has not happened
    gate.happen()
    event.wait()
    assert [stream.is_thread(one) for one in threads] == [elements > 4, True]
