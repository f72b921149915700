"""Processes that train the same layers, each with data of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Common
from stronghold.errors import ParallelError
from stronghold.unit.process_group import ONE_PROCESS, ProcessGroup


class Lane:
    """What replicas tell one another from one of their threads, for a process group has one order.

    ``local`` are those of this machine, ``opposite`` those of this one's number on each machine: they have the same
    share of every layer.
    """

    def __init__(self, local: ProcessGroup, opposite: ProcessGroup = ONE_PROCESS) -> None:
        self._local, self._opposite = local, opposite
        self._count = local.world_size * opposite.world_size

    def reduce_scatter_mean(self, flat: Tensor) -> None:
        """Makes the replica's own part of ``flat``, of ``local.world_size`` equal ones, the mean of all (in place).

        What the other parts hold afterwards is not said.
        """
        if not flat.numel():
            return
        self._local.reduce_scatter(flat)
        own = flat.view(self._local.world_size, -1)[self._local.rank]
        self._opposite.all_reduce(own)
        own.div_(self._count)

    def mean(self, values: Tensor) -> None:
        """Makes ``values`` the mean of all replicas', the same bits in each (in place)."""
        self._local.all_reduce(values)
        if self._opposite.world_size > 1:
            if self._local.rank == 0:
                self._opposite.all_reduce(values)
            self._local.broadcast(values)  # one sum for all: others might be added in another order
        values.div_(self._count)

    def sum(self, values: Tensor) -> None:
        """Makes ``values`` the sum of what each of a machine's replicas found in its share, the same bits in each."""
        self._local.all_reduce(values)

    def barrier(self) -> None:
        """Waits until all of this machine's are here."""
        self._local.barrier()


class Replicas:
    """The processes that train the same layers; those of one machine have its memory of them in common.

    A layer's gradients are the mean of all replicas'. Each of a machine's replicas brings its share of them down and
    updates that share of the layer there. So the weights of a machine's replicas are the same ones, those of different
    machines have the same bits, and all losses are those of one process with all the data.

    ``everyone`` are all replicas, ``local`` and ``opposite`` as a lane has them. There is a lane for each thread: the
    one that computes (``main``), the streams on which gradients come down and on which the host works, and the one
    that waits for updates. ``common_memory`` returns memory, all zero, that the processes of a group have in common.
    """

    def __init__(
        self,
        everyone: ProcessGroup,
        local: ProcessGroup,
        opposite: ProcessGroup,
        *,
        main: Lane,
        gradients: Lane,
        updates: Lane,
        written_back: Lane,
        common_memory: Callable[[ProcessGroup, int], Common],
    ) -> None:
        self.everyone, self._local, self._opposite = everyone, local, opposite
        self.rank, self.world_size = everyone.rank, everyone.world_size
        self.local_rank, self.local_world_size = local.rank, local.world_size
        self.main, self.gradients, self.updates, self.written_back = main, gradients, updates, written_back
        self._common_memory = common_memory

    def memory(self, length_bytes: int) -> Common | None:
        """Returns memory that all replicas of the machine have, all zero; None where there is one."""
        return self._common_memory(self._local, length_bytes) if self.local_world_size > 1 else None

    def from_rank0(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the machine's first replica while its others wait; where it raises, they raise too."""
        self._local.run_on_all(action if self.local_rank == 0 else lambda: None)

    def take_first(self, values: Tensor, *, common: bool) -> None:
        """Makes ``values`` those of the first of all replicas (in place).

        What a machine's replicas have in ``common`` its first one takes; the others see it when all have met.
        """
        if not common:
            self.everyone.broadcast(values)
        elif self.local_rank == 0:
            self._opposite.broadcast(values)

    def agree(
        self,
        done: object,
        *,
        settings: Mapping[str, Any] | None = None,
        named: Callable[[], Mapping[str, Any]] | None = None,
        here: bool = False,
        batch: int = 0,
    ) -> tuple[int, int]:
        """Raises ParallelError unless all replicas, or those ``here`` on this machine, have ``done`` the same.

        They must have the same optimizer's ``settings``, too, by what each is called; ``named`` says in the same way
        what they have done, for the error. Returns when they are here, with the least and the greatest ``batch``.
        """
        group = self._local if here else self.everyone
        if group.world_size == 1:
            return batch, batch
        seen = zlib.crc32(repr((done, settings)).encode())
        extremes = torch.tensor([seen, -seen, batch, -batch], device="cpu")
        group.all_reduce(extremes, "max")
        if extremes[0] != -extremes[1]:  # which all of the group see
            told = group.all_gather_object((settings, {} if named is None else named()))
            if all(one is not None for one, _ in told):  # else they are at different places
                self._check_settings([one for one, _ in told if one is not None])
            raise ParallelError(
                "replicas must compute the same layers in the same order, have gradients for the same parameters, and "
                "the same ones where a loop sets p.grad of a layer itself (those of backward() are the mean of all) "
                f"(got {_difference([one for _, one in told]) or str(done)[:300]}); give each data that take the same "
                "way through the model, and take the mean of what is set",
                ours=self.rank == 0,
            )
        return -int(extremes[3]), int(extremes[2])

    def _check_settings(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        first = everyone[0]
        for number, others in enumerate(everyone):
            for name in {**first, **others}:
                ours, other = first.get(name), others.get(name)
                if repr(ours) != repr(other):
                    raise ParallelError(
                        f"replicas must update with the same settings, for each updates its share of every layer (got "
                        f"{name} {ours} in replica 0 and {other} in replica {number}); set them from what is the same "
                        "in all, such as the mean of all replicas' losses",
                        ours=self.rank == 0,
                    )


def _difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first thing that a replica has done in another way than the first one, or nothing."""
    first = everyone[0]
    for number, others in enumerate(everyone):
        for name in {**first, **others}:
            if name not in first or name not in others:
                there, not_there = (number, 0) if name in others else (0, number)
                return f"{name} in replica {there}, and not in replica {not_there}"
        for name, ours in first.items():
            if repr(ours) != repr(others[name]):
                return f"{name} in another order or with other values in replica {number} than in replica 0"
    return ""


def _no_memory(processes: ProcessGroup, length_bytes: int) -> Common:
    raise AssertionError("a process alone has nothing in common")


_ALONE = Lane(ONE_PROCESS)
ONE_REPLICA = Replicas(
    ONE_PROCESS,
    ONE_PROCESS,
    ONE_PROCESS,
    main=_ALONE,
    gradients=_ALONE,
    updates=_ALONE,
    written_back=_ALONE,
    common_memory=_no_memory,
)
"""One process that trains its layers with all the data."""
