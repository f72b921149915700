"""Parameters that stages in several processes share: an embedding that is the head as well."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stronghold.distributed.mesh import groups_of
from stronghold.distributed.processes import Processes
from stronghold.engine import Engine
from stronghold.optim import HostAdamW, as_float, settings_now
from stronghold.planner.pipeline_order import Pipeline
from stronghold.unit import index_of, is_packed, unit_of


class Use(NamedTuple):
    """Where a shared parameter is: in a stage, by its name there, and its name in the whole model."""

    stage: int
    name: str
    whole_name: str


class Tied:
    """The copies of shared parameters, each of which gets the sum of all copies' gradients.

    As :meth:`begin_alike` has them begin alike they stay alike to the bit, for the same sum is added to each. To be
    made by all processes, before the ``model``, whose ``stages`` these are, is offloaded.
    """

    def __init__(self, stages: Sequence[nn.Module], order: Pipeline, processes: Processes, model: nn.Module) -> None:
        self._watch, self._processes, self._order = processes.watch, processes, order
        names = {id(module): name for name, module in model.named_modules()}
        first_names = {parameter: name for name, parameter in model.named_parameters()}
        users: dict[nn.Parameter, list[Use]] = {}
        for number, stage in enumerate(stages):
            for name, parameter in stage.named_parameters():
                users.setdefault(parameter, []).append(Use(number, name, _whole_name(stage, name, names)))
        self.uses: list[list[Use]] = []
        """Where each parameter is that several processes have."""
        self.shared: dict[nn.Parameter, str] = {}
        """Those of this process that another one has too, by the names that they have in one process."""
        self.copies: list[nn.Parameter] = []
        """Those that a process before this one has too."""
        self._all_names: dict[str, list[str]] = {}
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup, list[int]]] = []
        for parameter, uses in users.items():
            places = {order.device_of(use.stage) for use in uses}
            if len(places) == 1:
                continue
            self.uses.append(uses)
            name = first_names[parameter]
            self._all_names[name] = [name, *(use.whole_name for use in uses)]
            sets = [
                [first + place for place in sorted(places)] for first in range(0, processes.world_size, processes.each)
            ]
            group = groups_of(sets, self._watch)[processes.replica]
            if processes.place in places:
                self.shared[parameter] = name
                self._groups.append((parameter, group, sets[processes.replica]))
                if processes.place != min(places):
                    self.copies.append(parameter)

    @property
    def names(self) -> dict[str, nn.Parameter]:
        """All names in the whole model of this process's shared parameters, those in other processes too."""
        return {name: parameter for parameter, own in self.shared.items() for name in self._all_names[own]}

    @torch.no_grad()
    def begin_alike(self, engine: Engine) -> None:
        """Gives all copies, which are offloaded now, the first one's fp32 master, one parameter in memory at a time.

        Each process may have drawn, or been given, another one.
        """
        for parameter, group, ranks in self._groups:
            unit, index = unit_of(parameter), index_of(parameter)
            assert unit is not None
            if is_packed(parameter):
                continue  # files give all of them the same
            master = unit.master(index).detach().to("cpu", torch.float32, copy=True)
            with self._watch.waiting(ranks):
                dist.broadcast(master, ranks[0], group=group)
            engine.store.mark_dirty(unit)
            if index in unit.masters.remainders:
                unit.masters.fill(index, unit.weight[index], master.to(unit.weight[index].device))
            else:
                unit.weight[index].copy_(master)
            engine.store.drop(unit)
            for target, weight in zip(unit.on_device, unit.weight, strict=False):
                target.copy_(weight)
            unit.rewritten()
            unit.supersede()
            engine.changed([unit])

    def check_step(self, optimizer: HostAdamW) -> None:
        """Raises ParallelError, in all processes, where ``optimizer`` updates the copies of a parameter differently."""
        if not self.uses:
            return
        own = {name: _update_of(parameter, optimizer) for parameter, name in self.shared.items()}
        extremes = torch.full((2, len(self.uses)), -(2**63), device="cpu")
        for number, name in enumerate(self._all_names):
            if name in own:
                crc = zlib.crc32(repr(own[name]).encode())
                extremes[0, number], extremes[1, number] = crc, -crc
        self._processes.all_reduce(extremes, "max")
        if torch.equal(extremes[0], -extremes[1]):
            return
        everyone = self._processes.all_gather_object(own)
        for name, uses in zip(self._all_names, self.uses, strict=True):
            names = {self._order.device_of(use.stage): use.whole_name for use in reversed(uses)}
            found = {rank: others[name] for rank, others in enumerate(everyone) if name in others}
            first, *others = found
            for other in others:
                if found[other] != found[first]:
                    got = [
                        f"{names[rank % self._processes.each]} in process {rank} {_what(found[rank], found[of])}"
                        for rank, of in ((first, other), (other, first))
                    ]
                    self._processes.refuse(
                        "a parameter that stages share must be updated in the same way in all of them (got "
                        f"{' and '.join(got)}, which are one); give both names to the same group, with the same "
                        "settings"
                    )

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


def _update_of(parameter: nn.Parameter, optimizer: HostAdamW) -> dict[str, Any]:
    """Returns all that says how ``optimizer`` updates a parameter."""
    if not parameter.requires_grad:
        return {"frozen": True}
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, settings_now(optimizer), strict=True)):
        if any(parameter is one for one in group["params"]):
            common = {"states": optimizer.states, "max_grad_norm": optimizer.max_grad_norm}
            return {"group": number, **{name: as_float(value) for name, value in {**settings, **common}.items()}}
    return {"group": None}


def _what(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns what of a parameter's update is not as in ``other``."""
    return "with " + ", ".join(f"{key}={value!r}" for key, value in own.items() if other.get(key, ...) != value)


def _whole_name(stage: nn.Module, name: str, names: Mapping[int, str]) -> str:
    module, _, own = name.rpartition(".")
    whole = names.get(id(stage.get_submodule(module)), module)
    return f"{whole}{whole and '.'}{own}"
