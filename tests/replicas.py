"""Replicas that are threads of one process: what they say to one another goes through barriers."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Common
from stronghold.errors import ParallelError

_LONG_S = 30


class Exchange:
    """Where ``count`` threads hand in something each, and take what all have handed in."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self._given: list[Any] = [None] * count

    def all_gather_object(self, number: int, value: Any) -> list[Any]:
        self._given[number] = value
        self.barrier.wait(_LONG_S)
        given = list(self._given)
        self.barrier.wait(_LONG_S)
        return given


class ThreadLane:
    def __init__(self, exchange: Exchange, number: int, name: str) -> None:
        self.exchange = exchange
        self.number = number
        self.name = name

    def reduce_scatter_mean(self, flat: Tensor) -> None:
        parts = [given.view(self.exchange.count, -1)[self.number] for given in self._everyone(flat.clone())]
        flat.fill_(torch.nan)  # what is not its own is anything
        flat.view(self.exchange.count, -1)[self.number].copy_(sum(parts) / self.exchange.count)

    def mean(self, values: Tensor) -> None:
        values.copy_(sum(self._everyone(values.clone())) / self.exchange.count)

    def sum(self, values: Tensor) -> None:
        values.copy_(sum(self._everyone(values.clone())))

    def barrier(self) -> None:
        self._everyone(None)

    def _everyone(self, value: Any) -> list[Any]:
        return self.exchange.all_gather_object(self.number, value)


class ThreadReplicas:
    """One of several replicas, and the company of all of them."""

    def __init__(self, number: int, exchanges: dict[str, Exchange], memories: list[mmap.mmap]) -> None:
        self.rank = self.local_rank = number
        self.world_size = self.local_world_size = exchanges["main"].count
        self._exchange = exchanges["main"]
        self.main, self.gradients, self.updates, self.written_back = (
            ThreadLane(exchanges[name], number, name) for name in ("main", "gradients", "updates", "written_back")
        )
        self._memories = memories
        self._taken = 0

    def memory(self, length_bytes: int) -> Common:
        assert len(set(self.all_gather_object(length_bytes))) == 1
        if self.rank == 0:
            self._memories.append(mmap.mmap(-1, max(1, length_bytes)))
        self.all_gather_object(None)
        self._taken += 1
        return Common(self._memories[self._taken - 1], self.world_size)

    def from_rank0(self, action: Callable[[], None]) -> None:
        if self.rank == 0:
            action()
        self.all_gather_object(None)

    def take_first(self, values: Tensor, *, common: bool) -> None:
        if not common:  # in what they have in common is what the first one has put there
            values.copy_(self.all_gather_object(values.clone())[0])

    def agree(self, done: object, *, here: bool = False, batch: int = 0) -> tuple[int, int]:
        if len(set(map(repr, self.all_gather_object(done)))) > 1:
            raise ParallelError("replicas must compute the same")
        batches = self.all_gather_object(batch)
        return min(batches), max(batches)

    def sum(self, value: float) -> float:
        return sum(self.all_gather_object(value))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._exchange.all_gather_object(self.rank, value)

    def run_on_all(self, action: Callable[[], Any]) -> Any:
        return action()


def in_threads(count: int, action: Callable[[ThreadReplicas], Any]) -> list[Any]:
    """Returns what ``action`` returns in each of so many replicas; raises what the first raises that fails."""
    exchanges = {name: Exchange(count) for name in ("main", "gradients", "updates", "written_back")}
    memories: list[mmap.mmap] = []
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = action(ThreadReplicas(number, exchanges, memories))
        except BaseException as error:
            errors.append(error)
            for exchange in exchanges.values():
                exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
