"""Parameters that stages in several processes share: an embedding that is the head as well."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stronghold.distributed.mesh import groups_of
from stronghold.distributed.processes import Processes
from stronghold.planner.pipeline_order import Pipeline


class Tied:
    """The copies of shared parameters, each of which gets the sum of all copies' gradients.

    Where all copies begin alike they stay alike to the bit, for the same sum is added to each. To be made by all
    processes, before the model is offloaded.
    """

    def __init__(self, stages: Sequence[nn.Module], order: Pipeline, processes: Processes) -> None:
        self._watch = processes.watch
        users: dict[nn.Parameter, set[int]] = {}
        for number, stage in enumerate(stages):
            for parameter in stage.parameters():
                users.setdefault(parameter, set()).add(order.device_of(number))
        self.shared: list[nn.Parameter] = []
        """Those of this process that another one has too."""
        self.copies: list[nn.Parameter] = []
        """Those that a process before this one has too."""
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup, list[int]]] = []
        for parameter, places in users.items():
            if len(places) == 1:
                continue
            sets = [
                [first + place for place in sorted(places)] for first in range(0, processes.world_size, processes.each)
            ]
            group = groups_of(sets, self._watch)[processes.replica]
            if processes.place in places:
                self.shared.append(parameter)
                self._groups.append((parameter, group, sets[processes.replica]))
                if processes.place != min(places):
                    self.copies.append(parameter)

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sums up the gradients that come in inside; those that were there before are summed up already."""
        groups = [(parameter, group, ranks) for parameter, group, ranks in self._groups if parameter.requires_grad]
        before = {parameter: parameter.grad for parameter, _, _ in groups}
        for parameter in before:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in before.items():
                parameter.grad = gradient
            raise
        for parameter, group, ranks in groups:
            fresh = parameter.grad
            if fresh is None:
                fresh = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = self._summed(fresh, before[parameter], group, ranks)

    @torch.no_grad()
    def _summed(self, fresh: Tensor, before: Tensor | None, group: dist.ProcessGroup, ranks: Collection[int]) -> Tensor:
        total = fresh.to(torch.float32, copy=True)
        with self._watch.waiting(ranks):
            dist.all_reduce(total, group=group)
        # New ones: where there are replicas nobody writes into a gradient that the engine has added up.
        return total.to(fresh.dtype) if before is None else total.add_(before).to(before.dtype)
