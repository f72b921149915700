"""What the race check sees of the engine's host: its buffers, its threads, and what its kernels and disks touch.

A stream's thread is a line of its own. It hears of the thread that gave it a task with the task, and whoever waits for
an event hears of the thread in which it happened; nothing else orders them. All other threads are one line: autograd's
thread and the one that has called it take turns.

Importing this module has the engine take the device ``"soft"``, and notes for the rest of the process.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stronghold import native
from stronghold.device import ACCELERATORS, Accelerator, Event, HostBuffer, Stream
from stronghold.device.work_line import WorkLine
from stronghold.native import Blocks, Segment, Transfer
from stronghold.optim.muon_step import MomentumSegment, StepSegment
from tests.accelerator import soft


class Soft(Accelerator):
    """The accelerator in software, which pins memory where it lies and has a limit, as CUDA's driver does."""

    def pin(self, buffer: HostBuffer, copies: Sequence[torch.Stream]) -> bool:
        address = buffer.flat.data_ptr()
        soft.watch(address, buffer.length_bytes, pinned=True)
        weakref.finalize(buffer.memory, _unpin, address, list(copies)).atexit = False
        return True

    def limit_memory(self, limit_bytes: int) -> None:
        soft.limit(limit_bytes)


def _unpin(address: int, copies: list[torch.Stream]) -> None:
    for stream in (*copies, torch.accelerator.current_stream()):  # the last one has a loop's own copies
        stream.synchronize()
    soft.unwatch(address, pinned=True)


def _watch_buffers() -> None:
    begin = HostBuffer.__init__

    @functools.wraps(begin)
    def watched(self: HostBuffer, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.length_bytes:
            address = self.flat.data_ptr()
            soft.watch(address, self.length_bytes, pinned=False)
            finalizer = weakref.finalize(self.memory, soft.unwatch, address, pinned=False)
            finalizer.atexit = False

    HostBuffer.__init__ = watched  # type: ignore[method-assign]


def _order_threads() -> None:
    """Has a task hear of what its giver had done, and whoever finds an event done of what was done before it."""
    line, own = WorkLine, threading.local()
    add, give = line.add, line.give
    happen, wait, done = Event.happen, Event.wait, Event.done.fget
    happened: weakref.WeakKeyDictionary[Event, soft.Told] = weakref.WeakKeyDictionary()
    before: weakref.WeakKeyDictionary[WorkLine, soft.Told] = weakref.WeakKeyDictionary()
    """What the last task of a stream knew: whoever carries out the next one, its thread or a giver, comes behind it."""
    assert done is not None

    def heard(line, task):
        told = soft.Told()

        def run() -> None:
            name = threading.current_thread().name
            if not hasattr(own, "entered") and name.startswith("stronghold-"):  # its giver may carry it out as well
                own.entered = True
                soft.enter(name)
            told.hear()
            if line in before:
                before[line].hear()
            task()
            before[line] = soft.Told()

        return run

    def hear(event: Event) -> None:
        if (told := happened.get(event)) is not None:
            told.hear()

    def happen_told(self: Event) -> None:
        happened[self] = soft.Told()
        happen(self)

    def wait_and_hear(self: Event) -> None:
        wait(self)
        hear(self)

    def done_and_heard(self: Event) -> bool:
        if not done(self):
            return False
        hear(self)
        return True

    line.add = lambda self, task, now: add(self, heard(self, task), now)  # type: ignore[method-assign]
    line.give = lambda self, task, fail, now: give(self, heard(self, task), fail, now)  # type: ignore[method-assign]
    Event.happen, Event.wait = happen_told, wait_and_hear  # type: ignore[method-assign]
    Event.done = property(done_and_heard)  # type: ignore[method-assign, assignment]

    drain = Stream.drain

    def drain_and_hear(self: Stream) -> None:
        if self._ended or self._error is not None:
            drain(self)
        else:
            self.record().wait()

    Stream.drain = drain_and_hear  # type: ignore[method-assign]


def _moments(segment: Segment) -> Iterator[Tensor]:
    for moment in (segment.exp_avg, segment.exp_avg_sq):
        yield from (moment.codes, moment.exponents) if isinstance(moment, Blocks) else (moment,)


def _note_kernels() -> None:
    adamw, squared_norms, accumulate = native.adamw, native.squared_norms, native.accumulate

    @functools.wraps(adamw)
    def noted_adamw(segments, **kwargs):
        for segment in segments:
            for tensor in (segment.grad, segment.grad_remainder):
                if tensor is not None:
                    soft.touch(tensor, write=False, by="adamw")
            for tensor in (segment.weight, segment.remainder, *_moments(segment)):
                if tensor is not None:
                    soft.touch(tensor, write=True, by="adamw")
        adamw(segments, **kwargs)

    @functools.wraps(squared_norms)
    def noted_squared_norms(tensors, **kwargs):
        for tensor in tensors:
            soft.touch(tensor, write=False, by="squared_norms")
        return squared_norms(tensors, **kwargs)

    @functools.wraps(accumulate)
    def noted_accumulate(additions, **kwargs):
        for addition in additions:
            soft.touch(addition.source, write=False, by="accumulate")
            for tensor in (addition.target, addition.remainder):
                if tensor is not None:
                    soft.touch(tensor, write=True, by="accumulate")
        return accumulate(additions, **kwargs)

    native.adamw, native.squared_norms, native.accumulate = noted_adamw, noted_squared_norms, noted_accumulate


def _note_matrices() -> None:
    """Notes what Muon's updates touch of the host's memory: its kernels, and torch's operators in a stream's thread."""

    def noted(run, reads, writes):
        @functools.wraps(run)
        def touched(piece, **kwargs):
            for name in (*reads, *writes):
                if (tensor := getattr(piece, name)) is not None and tensor.is_cpu:
                    soft.touch(tensor, write=name in writes, by="muon")
            run(piece, **kwargs)

        return touched

    grads, weights = ("grad", "grad_remainder"), ("weight", "remainder")
    native.muon_momentum = noted(native.muon_momentum, grads, ("momentum_buffer", "direction"))
    native.muon_move = noted(native.muon_move, ("direction",), weights)
    MomentumSegment._run = noted(MomentumSegment._run, grads, ("momentum_buffer", "values"))  # type: ignore[method-assign]
    StepSegment._run = noted(StepSegment._run, ("values",), weights)  # type: ignore[method-assign]


def _note_transfers() -> None:
    submit, wait, done = native.Disk._submit, Transfer.wait, Transfer.done
    ends: weakref.WeakKeyDictionary[Transfer, soft.Told] = weakref.WeakKeyDictionary()

    def noted(self, file, write, memory, offset, *args):
        told = soft.transfer(memory, file.path, offset, to_file=write)
        begun = submit(self, file, write, memory, offset, *args)
        ends[begun] = told
        return begun

    def hear(transfer: Transfer) -> None:
        if (told := ends.get(transfer)) is not None:
            told.hear()

    def wait_and_hear(self: Transfer, *args, **kwargs) -> bool:
        ended = wait(self, *args, **kwargs)
        if ended:
            hear(self)
        return ended

    def done_and_heard(self: Transfer) -> bool:
        ended = done(self)
        if ended:
            hear(self)
        return ended

    native.Disk._submit = noted  # type: ignore[method-assign]
    Transfer.wait, Transfer.done = wait_and_hear, done_and_heard  # type: ignore[method-assign]


class NotedOperators(TorchDispatchMode):
    """Notes what the calling thread's operators read and write of the host's memory: a user's, and the engine's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, arguments = kwargs or {}, func._schema.arguments
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        named = [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
        given = [
            (argument, value if isinstance(value, (list, tuple)) else (value,))
            for argument, value in (*zip(arguments, args, strict=False), *named)
        ]
        copies = any(isinstance(one, Tensor) and not one.is_cpu for _, value in given for one in value)
        asks = func is torch.ops.aten.is_pinned.default  # which reads none of it
        if not view and not copies and not asks:  # copies the device notes
            for argument, value in given:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value:
                    if isinstance(tensor, Tensor) and tensor.is_contiguous():
                        soft.touch(tensor, write=writes, by=str(func))
        return func(*args, **kwargs)


ACCELERATORS[soft.NAME] = Soft
_watch_buffers()
_order_threads()
_note_kernels()
_note_matrices()
_note_transfers()
