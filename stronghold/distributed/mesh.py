"""Where each process is: torch's DeviceMesh of machines, the replicas on each, and their stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stronghold.distributed.watch import Watch

MACHINE, REPLICA, STAGE = DIMENSIONS = ("machine", "replica", "stage")
"""Along the first are the same stages on other machines, along the second those in one machine's memory, along the
third the processes of one replica, on whatever machines they are."""


def ranks_by_place(machines: Sequence[tuple[str, str]], each: int) -> Tensor:
    """Returns the ranks of processes by their places: int64 [machines, replicas on each, ``each``].

    Process r · ``each`` + p is number p of replica r, and on the machine ``machines[rank]``, whose name comes first.
    Raises ValueError where machines have not as many replicas, or not the same ones for each p.
    """
    hosts = []  # for each p the machine of each replica, by the order in which machines come
    for place in range(each):
        known: dict[tuple[str, str], int] = {}
        hosts.append([known.setdefault(machine, len(known)) for machine in machines[place::each]])
    for place, of_one in enumerate(hosts):
        found = Counter(of_one)
        if of_one != hosts[0] or len(set(found.values())) > 1:
            names = list(dict.fromkeys(machines[place::each]))
            told = ", ".join(f"{found[number]} on {name}" for number, (name, *_) in enumerate(names))
            raise ValueError(
                f"every machine that has replicas must have as many of them (got {told} for process {place} of each); "
                f"start torchrun with the same --nproc-per-node on all machines, one that divides by {each} or divides "
                "it"
            )
    order = sorted(range(len(hosts[0])), key=hosts[0].__getitem__)  # by machine; a stable sort keeps a machine's order
    replicas = torch.tensor(order, device="cpu").view(len(set(hosts[0])), -1, 1)
    return replicas * each + torch.arange(each, device="cpu")


def mesh_of(ranks: Tensor, device_type: str, watch: Watch) -> DeviceMesh:
    """Returns the mesh, with a process group for each dimension. To be asked for by all processes at once."""
    with watch.waiting():
        return DeviceMesh(device_type, ranks, mesh_dim_names=DIMENSIONS)


def sets_along(ranks: Tensor, *dimensions: str) -> list[list[int]]:
    """Returns all sets of ranks whose places differ in these ``dimensions`` alone."""
    moved = [DIMENSIONS.index(name) for name in dimensions]
    last = list(range(-len(moved), 0))
    sets: list[list[int]] = ranks.movedim(moved, last).flatten(-len(moved)).flatten(0, -2).tolist()
    return sets


def groups_of(sets: Sequence[Sequence[int]], watch: Watch) -> list[dist.ProcessGroup]:
    """Returns a new group of each of the ``sets`` of ranks; all processes make all of them."""
    with watch.waiting():
        return [dist.new_group(list(ranks)) for ranks in sets]
