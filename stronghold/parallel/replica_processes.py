"""Replicas: what they say to one another, and the memory that those of one machine have in common."""

from __future__ import annotations

import mmap
import os
import resource
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stronghold.device import Common
from stronghold.errors import ParallelError
from stronghold.parallel.mesh import MACHINE, REPLICA, groups_of, sets_along
from stronghold.parallel.watch import Watch
from stronghold.unit import Lane
from stronghold.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """Those of ``ranks``, of which this process has the ``rank``; ``link`` is None where it is alone."""

    link: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int = 0

    @property
    def world_size(self) -> int:
        return len(self.ranks)


class ReplicaProcesses:
    """The processes of which each trains a part of a batch; those of one machine have its memory in common.

    All processes make this at once, each with the ``mesh`` of all and its ``rank``. Each thread has groups of its own,
    for in a group everything has one order; the thread that computes has the mesh's. Raises ParallelError where the
    system has no memory to have in common.
    """

    def __init__(self, mesh: DeviceMesh, rank: int, watch: Watch) -> None:
        self._watch, self._alone = watch, RankGroup(None, (rank,))
        here, opposite = sets_along(mesh.mesh, REPLICA), sets_along(mesh.mesh, MACHINE)
        self._here = self._group(here, mesh.get_group(REPLICA))
        # Those of the same number on each machine have the same share of every layer.
        self._opposite = self._group(opposite, mesh.get_group(MACHINE))
        if self._here.world_size == 1 or self._opposite.world_size == 1:
            self._all = self._here if self._opposite.world_size == 1 else self._opposite
        else:
            self._all = self._group(sets_along(mesh.mesh, MACHINE, REPLICA))
        self.rank, self.world_size = self._all.rank, self._all.world_size
        self.local_rank, self.local_world_size = self._here.rank, self._here.world_size
        if self.local_world_size > 1 and not hasattr(os, "memfd_create"):
            raise ParallelError(
                "replicas here have memory in common by Linux's memfd_create (got a system without); use stages",
                ours=rank == 0,
            )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # each piece of common memory has a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.main: Lane = ProcessLane(self._here, self._opposite, watch.waiting)
        self.gradients: Lane = ProcessLane(self._group(here), self._group(opposite), watch.beside)
        self.updates: Lane = ProcessLane(self._group(here), self._alone, watch.beside)
        self.written_back: Lane = ProcessLane(self._group(here), self._alone, watch.beside)

    def _group(self, sets: Sequence[list[int]], link: dist.ProcessGroup | None = None) -> RankGroup:
        """Returns that of the ``sets`` of ranks that this process is in; without a ``link`` all make all of them."""
        if all(len(ranks) == 1 for ranks in sets):
            return self._alone
        (rank,) = self._alone.ranks
        which = next(number for number, ranks in enumerate(sets) if rank in ranks)
        link = groups_of(sets, self._watch)[which] if link is None else link
        return RankGroup(link, tuple(sets[which]), sets[which].index(rank))

    def memory(self, length_bytes: int) -> Common | None:
        """Returns memory that all replicas here have, all zero. It goes with the last process that has it."""
        if self.local_world_size == 1:
            return None
        length = max(length_bytes, 1)
        descriptor, error = -1, ""
        if self.local_rank == 0:
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
        if self.local_rank:
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
                f"the system refused {format_bytes(length_bytes)} of memory to {self.local_world_size} replicas in "
                f"common ({errors[0]}); start them as one user in one container, or use stages"
            )
        return Common(mapped, self.local_world_size)

    def from_rank0(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the machine's first replica while its others wait; where it raises, they raise too."""
        error = None
        if self.local_rank == 0:
            try:
                action()
            except Exception as raised:  # told to the others first, then raised
                error = raised
        told = self._everyone(None if error is None else str(error) or type(error).__name__)[0]
        if error is not None:
            raise error
        if told is not None:
            raise ParallelError(f"replica 0 failed: {told}", ours=False)

    def take_first(self, values: Tensor, *, common: bool) -> None:
        """Makes ``values`` those of the first replica; what is in ``common`` here the first one takes."""
        group = self._opposite if common else self._all
        if group.link is None or (common and self.local_rank):
            return
        sent = values.contiguous()
        with self._watch.waiting(group.ranks):
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group.link, group_src=0)  # not all dtypes are sent
            _settle(sent)
        if sent is not values:
            values.copy_(sent)

    def agree(self, done: object, *, here: bool = False, batch: int = 0) -> tuple[int, int]:
        """Raises ParallelError unless all replicas, or those ``here``, have ``done`` the same."""
        group = self._here if here else self._all
        if group.link is None:
            return batch, batch
        seen = zlib.crc32(repr(done).encode())
        extremes = torch.tensor([seen, -seen, batch, -batch])
        with self._watch.waiting(group.ranks):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group.link)
        if extremes[0] != -extremes[1]:
            raise ParallelError(
                "replicas must compute the same layers in the same order, and have gradients for the same parameters "
                f"(replica {self.rank}: {str(done)[:300]}); give each data that take the same way through the model",
                ours=self.rank == 0,
            )
        return -int(extremes[3]), int(extremes[2])

    def _everyone(self, value: T) -> list[T]:
        """Returns the ``value`` of each replica here."""
        values: list[T] = [value] * self.local_world_size
        if self._here.link is not None:
            with self._watch.waiting(self._here.ranks):
                dist.all_gather_object(values, value, group=self._here.link)
        return values


_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name


def _settle(tensor: Tensor) -> None:
    """Waits for what a collective does to ``tensor``: NCCL's returns at once, and that a peer is gone must be seen."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


class ProcessLane:
    """What replicas say to one another from one of their threads: those ``here``, and those ``opposite`` elsewhere."""

    def __init__(
        self, here: RankGroup, opposite: RankGroup, waiting: Callable[[Collection[int]], AbstractContextManager[None]]
    ) -> None:
        self._here = here
        self._opposite = opposite
        self._waiting = partial(waiting, {*here.ranks, *opposite.ranks})

    def reduce_scatter_mean(self, flat: Tensor) -> None:
        if not flat.numel():
            return
        own = flat.view(self._here.world_size, -1)[self._here.rank]
        with self._waiting():
            if self._here.link is not None:
                _reduce_scatter(own, flat, group=self._here.link)
            if self._opposite.link is not None:
                dist.all_reduce(own, group=self._opposite.link)
            _settle(own)
        own.div_(self._here.world_size * self._opposite.world_size)

    def mean(self, values: Tensor) -> None:
        self.sum(values)
        if self._opposite.link is not None:
            with self._waiting():
                if self._here.rank == 0:
                    dist.all_reduce(values, group=self._opposite.link)
                if self._here.link is not None:  # one sum for all: others might be added in another order
                    dist.broadcast(values, group=self._here.link, group_src=0)
                _settle(values)
        values.div_(self._here.world_size * self._opposite.world_size)

    def sum(self, values: Tensor) -> None:
        if self._here.link is not None:
            with self._waiting():
                dist.all_reduce(values, group=self._here.link)
                _settle(values)

    def barrier(self) -> None:
        if self._here.link is not None:
            with self._waiting():
                dist.all_reduce(torch.zeros(()), group=self._here.link)  # on the host, whatever the device
