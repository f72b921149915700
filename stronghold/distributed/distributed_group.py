"""A process group of torch.distributed, whose processes are watched while others wait for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stronghold.distributed.watch import Watch
from stronghold.errors import ParallelError

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name


class DistributedGroup:
    """The processes of ``link``, whose ranks among all are ``ranks``; this one's is ``rank``.

    It waits for those of ``awaited`` (of ``ranks``, if it is None): others may end meanwhile. With ``beside``, that is
    in another thread than the main one.
    """

    def __init__(
        self,
        link: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        watch: Watch,
        *,
        awaited: Collection[int] | None = None,
        beside: bool = False,
    ) -> None:
        self.rank, self.world_size = list(ranks).index(rank), len(ranks)
        self.watch = watch
        self._link, self._members = link, tuple(ranks)
        self._waiting: Callable[[], AbstractContextManager[None]] = partial(
            watch.beside if beside else watch.waiting, self._members if awaited is None else awaited
        )

    def barrier(self) -> None:
        with self._waiting():
            dist.all_reduce(torch.zeros((), device="cpu"), group=self._link)  # on the host, whatever the device

    def all_reduce(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        with self._waiting():
            dist.all_reduce(values, _OPS[op], group=self._link)
            _settle(values)

    def reduce_scatter(self, flat: Tensor) -> None:
        own = flat.view(self.world_size, -1)[self.rank]
        with self._waiting():
            _reduce_scatter(own, flat, group=self._link)
            _settle(own)

    def broadcast(self, values: Tensor) -> None:
        sent = values.contiguous()
        with self._waiting():
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self._link, group_src=0)  # not all dtypes are sent
            _settle(sent)
        if sent is not values:
            values.copy_(sent)

    def all_gather_object(self, value: T) -> list[T]:
        values = self._gathered(value)
        if (failed := _failed(values)) is not None:  # in what all run, before it came here
            self.watch.all_know = True
            raise self._elsewhere(failed, values)
        return values

    def run_on_all(self, action: Callable[[], T]) -> T:
        with self.watch.together():
            return self._run_together(action)

    def run_on_first(self, action: Callable[[], None], name: str) -> None:
        known = self.watch.next_alone(name)
        if self.rank:
            with self.watch.waiting(self._members[:1]):
                failed = self.watch.heard(self._members[0], known)
            if failed:
                raise ParallelError(f"process {self._members[0]} failed: {failed}", ours=False)
            return
        try:
            action()
        except Exception as error:
            self.watch.say(known, str(error) or type(error).__name__)
            raise
        self.watch.say(known, "")

    def _run_together(self, action: Callable[[], T]) -> T:
        result, error, failure = None, None, None
        try:
            result = action()
        except Exception as raised:  # told to the others first, then raised
            if self.watch.all_know:
                raise
            error, failure = raised, _Failure(str(raised) or type(raised).__name__)
            self.watch.fail(failure.text)
        values = self._gathered(failure)
        if (failed := _failed(values)) is None:
            return result  # type: ignore[return-value]
        self.watch.all_know = True
        if self.rank != failed:
            raise self._elsewhere(failed, values) from error
        assert error is not None
        raise error

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with self._waiting():
            dist.all_gather_object(values, value, group=self._link)
        return values

    def _elsewhere(self, rank: int, values: list[Any]) -> ParallelError:
        return ParallelError(f"process {self._members[rank]} failed: {values[rank].text}", ours=False)


class _Failure(NamedTuple):
    """What a process sends that has failed in what all run, while others may still gather something within it."""

    text: str


def _failed(values: Sequence[Any]) -> int | None:
    """Returns the first rank that has failed."""
    return next((rank for rank, value in enumerate(values) if isinstance(value, _Failure)), None)


def _settle(tensor: Tensor) -> None:
    """Waits for what a collective does to ``tensor``: NCCL's returns at once, and that a peer is gone must be seen."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
