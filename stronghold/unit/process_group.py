"""What processes tell one another: one interface, in torch.distributed's words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ProcessGroup(Protocol):
    """Some processes, of which all call the same methods in the same order. Tensors are changed in place."""

    rank: int
    """Which of them this process is."""
    world_size: int
    """How many they are."""

    def barrier(self) -> None:
        """Waits until all are here."""

    def all_reduce(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Makes ``values`` the sum, or the maximum, of all processes', the same bits in each."""

    def reduce_scatter(self, flat: Tensor) -> None:
        """Makes the process's own part of ``flat``, of ``world_size`` equal ones, the sum of all processes'.

        What the other parts hold afterwards is not said.
        """

    def broadcast(self, values: Tensor) -> None:
        """Makes ``values``, of any dtype, those of rank 0."""

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the ``value`` of every process, in the order of their ranks."""

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Runs ``action`` in every process, and waits for all.

        Where it raises in one, all raise, and the first of those has it to say.
        """

    def run_on_first(self, action: Callable[[], None], name: str) -> None:
        """Runs ``action`` in rank 0, which waits for none of the others: they need not call this.

        Those that do, as often as rank 0 with this ``name``, wait until it is done, and raise where it has raised.
        """


class OneProcess:
    """A process alone."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        pass

    def all_reduce(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        pass

    def reduce_scatter(self, flat: Tensor) -> None:
        pass

    def broadcast(self, values: Tensor) -> None:
        pass

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def run_on_all(self, action: Callable[[], T]) -> T:
        return action()

    def run_on_first(self, action: Callable[[], None], name: str) -> None:
        action()


ONE_PROCESS: ProcessGroup = OneProcess()


def from_rank0(processes: ProcessGroup, action: Callable[[], T]) -> T:
    """Returns in every process what ``action`` returns in the first; where it raises, all raise."""
    done = processes.run_on_all(action if processes.rank == 0 else lambda: None)
    return processes.all_gather_object(done)[0]  # type: ignore[return-value]


def sum_over(processes: ProcessGroup, value: float) -> float:
    """Returns the sum of all processes' ``value``, correctly rounded, and so the same bits in each.

    Not a number if one is not finite.
    """
    values = torch.zeros(processes.world_size, dtype=torch.float64, device="cpu")
    values[processes.rank] = value
    processes.all_reduce(values)  # each number plus zeros
    found = values.tolist()
    return math.fsum(found) if all(map(math.isfinite, found)) else math.nan
