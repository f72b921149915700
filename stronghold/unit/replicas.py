"""Processes that train the same layers, each with data of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from stronghold.device import Common


class Lane(Protocol):
    """What replicas say to one another from one of their threads, all in the same order."""

    def reduce_scatter_mean(self, flat: Tensor) -> None:
        """Makes the replica's own part of ``flat``, of ``local_world_size`` equal ones, the mean of all (in place).

        What the other parts hold afterwards is not said.
        """

    def mean(self, values: Tensor) -> None:
        """Makes ``values`` the mean of all replicas', the same bits in each (in place)."""

    def sum(self, values: Tensor) -> None:
        """Makes ``values`` the sum of what each of a machine's replicas found in its share, the same bits in each."""

    def barrier(self) -> None:
        """Waits until all of this machine's are here."""


class Replicas(Protocol):
    """The processes that train the same layers; those of one machine have its memory of them in common.

    A layer's gradients are the mean of all replicas'. Each of a machine's replicas brings its share of them down and
    updates that share of the layer there. So the weights of a machine's replicas are the same ones, those of different
    machines have the same bits, and all losses are those of one process with all the data.
    """

    local_rank: int
    """Which of this machine's replicas this process is."""
    local_world_size: int
    """How many this machine has."""
    rank: int
    """Which of all replicas this process is."""
    world_size: int
    """How many there are on all machines, each of which has as many."""
    main: Lane
    """Of the thread that computes."""
    gradients: Lane
    """Of the stream on which gradients come down."""
    updates: Lane
    """Of the stream on which the host works."""
    written_back: Lane
    """Of the stream that waits for updates."""

    def memory(self, length_bytes: int) -> Common | None:
        """Returns memory that all replicas of the machine have, all zero; None where there is one."""

    def from_rank0(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the machine's first replica while its others wait; where it raises, they raise too."""

    def take_first(self, values: Tensor, *, common: bool) -> None:
        """Makes ``values`` those of the first of all replicas (in place).

        What a machine's replicas have in ``common`` its first one takes; the others see it when all have met.
        """

    def agree(self, done: object, *, here: bool = False, batch: int = 0) -> tuple[int, int]:
        """Raises ParallelError unless all replicas, or those ``here`` on this machine, have ``done`` the same.

        Returns when they are here, with the least and the greatest ``batch`` of them.
        """


class _Alone:
    def reduce_scatter_mean(self, flat: Tensor) -> None:
        pass

    def mean(self, values: Tensor) -> None:
        pass

    def sum(self, values: Tensor) -> None:
        pass

    def barrier(self) -> None:
        pass


class OneReplica:
    """One process that trains its layers with all the data."""

    local_rank = rank = 0
    local_world_size = world_size = 1
    main: Lane = _Alone()
    gradients: Lane = main
    updates: Lane = main
    written_back: Lane = main

    def memory(self, length_bytes: int) -> None:
        return None

    def from_rank0(self, action: Callable[[], None]) -> None:
        action()

    def take_first(self, values: Tensor, *, common: bool) -> None:
        pass

    def agree(self, done: object, *, here: bool = False, batch: int = 0) -> tuple[int, int]:
        return batch, batch


ONE_REPLICA: Replicas = OneReplica()
