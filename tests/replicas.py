"""Replicas that are threads of one process: what they say to one another goes through barriers."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Common
from stronghold.unit import ONE_PROCESS, Lane, ProcessGroup, Replicas

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


class ThreadGroup:
    """Replicas that are threads, as one of their streams has them."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank, self.world_size = rank, exchange.count

    def barrier(self) -> None:
        self.all_gather_object(None)

    def all_reduce(self, values: Tensor, op: str = "sum") -> None:
        given = torch.stack(self.all_gather_object(values.clone()))
        values.copy_(given.amax(0) if op == "max" else sum(given.unbind()))

    def reduce_scatter(self, flat: Tensor) -> None:
        parts = [given.view(self.world_size, -1)[self.rank] for given in self.all_gather_object(flat.clone())]
        flat.fill_(torch.nan)  # what is not its own is anything
        flat.view(self.world_size, -1)[self.rank].copy_(sum(parts))

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self.all_gather_object(values.clone())[0])

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.exchange.all_gather_object(self.rank, value)

    def run_on_all(self, action: Callable[[], Any]) -> Any:
        result, error = None, None
        try:
            result = action()
        except Exception as raised:  # told to the others first, then raised
            error = raised
        failed = [told for told in self.all_gather_object(error) if told is not None]
        if failed:
            raise failed[0]
        return result


def replicas_of(rank: int, exchanges: dict[str, Exchange], memories: list[mmap.mmap]) -> Replicas:
    """Returns one of several replicas, all on one machine."""
    groups = {name: ThreadGroup(exchange, rank) for name, exchange in exchanges.items()}
    taken = 0

    def memory(processes: ProcessGroup, length_bytes: int) -> Common:
        nonlocal taken
        assert len(set(processes.all_gather_object(length_bytes))) == 1
        if rank == 0:
            memories.append(mmap.mmap(-1, max(1, length_bytes)))
        processes.barrier()
        taken += 1
        return Common(memories[taken - 1], processes.world_size)

    main = groups.pop("main")
    lanes = {name: Lane(group) for name, group in groups.items()}
    return Replicas(main, main, ONE_PROCESS, main=Lane(main), **lanes, common_memory=memory)


def in_threads(count: int, action: Callable[[Replicas], Any]) -> list[Any]:
    """Returns what ``action`` returns in each of so many replicas; raises what the first raises that fails."""
    exchanges = {name: Exchange(count) for name in ("main", "gradients", "updates", "written_back")}
    memories: list[mmap.mmap] = []
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = action(replicas_of(number, exchanges, memories))
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
