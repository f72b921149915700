"""Replicas of one machine: what they say to one another, and the memory that they have in common."""

from __future__ import annotations

import mmap
import os
import resource
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stronghold.device import Common
from stronghold.errors import ParallelError
from stronghold.home import Lane
from stronghold.parallel.watch import Watch
from stronghold.units import format_bytes

T = TypeVar("T")


def groups_of(sets: Sequence[Sequence[int]], watch: Watch) -> list[dist.ProcessGroup]:
    """Returns a group of each of the ``sets`` of ranks; all processes make all of them."""
    with watch.waiting():
        return [dist.new_group(list(ranks)) for ranks in sets]


class ReplicaProcesses:
    """The processes of which each trains a part of a batch, and which have the memory of the host in common.

    ``sets`` are the ranks of the replicas of each part of the model; all processes make this at once. Each thread has
    a group of its own, for in a group everything has one order. Raises ParallelError where the system has no memory to
    have in common.
    """

    gradients: Lane
    updates: Lane
    landing: Lane

    def __init__(self, sets: Sequence[Sequence[int]], rank: int, watch: Watch) -> None:
        which = next(number for number, ranks in enumerate(sets) if rank in ranks)
        if not hasattr(os, "memfd_create"):
            raise ParallelError(
                "replicas have memory in common by Linux's memfd_create (got a system without); use stages",
                ours=rank == 0,
            )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # each piece of common memory has a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.number, self.count = list(sets[which]).index(rank), len(sets[which])
        self._watch = watch
        self._group = groups_of(sets, watch)[which]
        self.main: Lane = ProcessLane(self._group, self.number, self.count, watch.waiting)
        self.gradients, self.updates, self.landing = (
            ProcessLane(groups_of(sets, watch)[which], self.number, self.count, watch.beside) for _ in range(3)
        )

    def memory(self, length_bytes: int) -> Common:
        """Returns memory that all replicas have, all zero. It goes with the last process that has it."""
        length = max(length_bytes, 1)
        descriptor, error = -1, ""
        if self.number == 0:
            try:
                descriptor = os.memfd_create("stronghold", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, length)
            except OSError as raised:
                error = str(raised)
        told = self._everyone((length, os.getpid(), descriptor))
        if len({one[0] for one in told}) > 1:
            raise ParallelError(
                f"replicas must need the same memory (got {', '.join(format_bytes(one[0]) for one in told)}); build "
                "the same model and optimizer in each"
            )
        if self.number:
            _, process, number = told[0]
            try:
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as raised:
                error = str(raised)
        try:
            mapped = None if error else mmap.mmap(descriptor, length)
        except OSError as raised:
            mapped, error = None, str(raised)
        errors = [one for one in self._everyone(error) if one]  # from here on the first one's descriptor is not needed
        if descriptor >= 0:
            os.close(descriptor)
        if mapped is None or errors:
            raise MemoryError(
                f"the system refused {format_bytes(length_bytes)} of memory to {self.count} replicas in common "
                f"({errors[0]}); start them as one user in one container, or use stages"
            )
        return Common(mapped, self.count)

    def by_first(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the first replica while the others wait; where it raises, all raise."""
        error = None
        if self.number == 0:
            try:
                action()
            except Exception as raised:  # told to the others first, then raised
                error = raised
        told = self._everyone(None if error is None else str(error) or type(error).__name__)[0]
        if error is not None:
            raise error
        if told is not None:
            raise ParallelError(f"replica 0 failed: {told}", ours=False)

    def agree(self, done: object) -> None:
        """Raises ParallelError unless all replicas have ``done`` the same; returns when all are here."""
        seen = torch.tensor(zlib.crc32(repr(done).encode()), dtype=torch.int64)
        extremes = torch.stack([seen, -seen])
        with self._watch.waiting():
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        if extremes[0] != -extremes[1]:
            raise ParallelError(
                "replicas must compute the same layers in the same order, and have gradients for the same parameters "
                f"(replica {self.number}: {str(done)[:300]}); give each data that take the same way through the model",
                ours=self.number == 0,
            )

    def _everyone(self, value: T) -> list[T]:
        values: list[T] = [value] * self.count
        with self._watch.waiting():
            dist.all_gather_object(values, value, group=self._group)
        return values


_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name


def _settle(tensor: Tensor) -> None:
    """Waits for what a collective does to ``tensor``: NCCL's returns at once, and that a peer is gone must be seen."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


class ProcessLane:
    """What replicas say to one another from one of their threads, by one group."""

    def __init__(
        self, group: dist.ProcessGroup, number: int, count: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._group = group
        self._number = number
        self._count = count
        self._waiting = waiting

    def mean_share(self, flat: Tensor) -> None:
        if not flat.numel():
            return
        own = flat.view(self._count, -1)[self._number]
        with self._waiting():
            _reduce_scatter(own, flat, group=self._group)
            _settle(own)
        own.div_(self._count)

    def mean(self, values: Tensor) -> None:
        self.sum(values)
        values.div_(self._count)

    def sum(self, values: Tensor) -> None:
        with self._waiting():
            dist.all_reduce(values, group=self._group)
            _settle(values)

    def take_first(self, values: Tensor) -> None:
        with self._waiting():
            dist.broadcast(values, group=self._group, group_src=0)
            _settle(values)

    def meet(self) -> None:
        with self._waiting():
            dist.all_reduce(torch.zeros(()), group=self._group)  # on the host, whatever the device
