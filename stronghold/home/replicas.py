"""Processes that train the same layers, each with data of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from stronghold.device import Common


class Lane(Protocol):
    """What replicas say to one another from one of their threads, all in the same order."""

    def mean_share(self, flat: Tensor) -> None:
        """Makes the replica's own part of ``flat``, which is as many equal ones, the mean of all replicas' (in place).

        What the other parts hold afterwards is not said.
        """

    def mean(self, values: Tensor) -> None:
        """Makes ``values`` the mean of all replicas', the same bits in each (in place)."""

    def sum(self, values: Tensor) -> None:
        """Makes ``values`` the sum of all replicas', the same bits in each (in place)."""

    def take_first(self, values: Tensor) -> None:
        """Makes ``values`` those of the first replica (in place)."""

    def meet(self) -> None:
        """Waits until all are here."""


class Replicas(Protocol):
    """The processes that train the same layers, and have the host's memory of them in common.

    Each updates its share of every layer there; a layer's gradients are the mean of all replicas', and each brings its
    share of them down. So their weights are the same ones, and their losses those of one process with all the data.
    """

    number: int
    """Which of them this process is."""
    count: int
    main: Lane
    """Of the thread that computes."""
    gradients: Lane
    """Of the stream on which gradients come down."""
    updates: Lane
    """Of the stream on which the host works."""
    landing: Lane
    """Of the stream that waits for updates."""

    def memory(self, length_bytes: int) -> Common | None:
        """Returns memory that all replicas have, all zero; None where there is one."""

    def by_first(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the first replica while the others wait; where it raises, all raise."""

    def agree(self, done: object) -> None:
        """Raises ParallelError unless all replicas have ``done`` the same; returns when all are here."""


class _Alone:
    def mean_share(self, flat: Tensor) -> None:
        pass

    def mean(self, values: Tensor) -> None:
        pass

    def sum(self, values: Tensor) -> None:
        pass

    def take_first(self, values: Tensor) -> None:
        pass

    def meet(self) -> None:
        pass


class OneReplica:
    """One process that trains its layers with all the data."""

    number = 0
    count = 1
    main: Lane = _Alone()
    gradients: Lane = main
    updates: Lane = main
    landing: Lane = main

    def memory(self, length_bytes: int) -> None:
        return None

    def by_first(self, action: Callable[[], None]) -> None:
        action()

    def agree(self, done: object) -> None:
        pass


ONE_REPLICA: Replicas = OneReplica()
