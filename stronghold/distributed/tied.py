"""Parameters that stages in several processes share: an embedding that is the head as well."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stronghold.distributed.mesh import groups_of
from stronghold.distributed.processes import Processes
from stronghold.planner.pipeline_order import Pipeline


class Use(NamedTuple):
    """Where a shared parameter is: in a stage, by its name there, and its name in the whole model."""

    stage: int
    name: str
    whole_name: str


class Tied:
    """The copies of shared parameters, each of which gets the sum of all copies' gradients.

    Where all copies begin alike they stay alike to the bit, for the same sum is added to each. To be made by all
    processes, before the model is offloaded. ``names`` are those of its modules, by their ids.
    """

    def __init__(
        self, stages: Sequence[nn.Module], order: Pipeline, processes: Processes, names: Mapping[int, str]
    ) -> None:
        self._watch = processes.watch
        users: dict[nn.Parameter, list[Use]] = {}
        for number, stage in enumerate(stages):
            for name, parameter in stage.named_parameters():
                users.setdefault(parameter, []).append(Use(number, name, _whole_name(stage, name, names)))
        self.uses: list[list[Use]] = []
        """Where each parameter is that several processes have."""
        self.shared: list[nn.Parameter] = []
        """Those of this process that another one has too."""
        self.copies: list[nn.Parameter] = []
        """Those that a process before this one has too."""
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup, list[int]]] = []
        for parameter, uses in users.items():
            places = {order.device_of(use.stage) for use in uses}
            if len(places) == 1:
                continue
            self.uses.append(uses)
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


def _whole_name(stage: nn.Module, name: str, names: Mapping[int, str]) -> str:
    module, _, own = name.rpartition(".")
    whole = names.get(id(stage.get_submodule(module)), module)
    return f"{whole}{whole and '.'}{own}"
