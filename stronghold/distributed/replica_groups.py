"""The process groups of replicas, and the memory that those of one machine have in common."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stronghold.device import Common
from stronghold.distributed.distributed_group import DistributedGroup
from stronghold.distributed.mesh import MACHINE, REPLICA, groups_of, sets_along
from stronghold.distributed.watch import Watch
from stronghold.errors import ParallelError
from stronghold.unit import ONE_PROCESS, Lane, ProcessGroup, Replicas
from stronghold.units import format_bytes


def replicas_of(mesh: DeviceMesh, rank: int, watch: Watch) -> Replicas:
    """Returns the processes of which each trains a part of a batch; those of one machine have its memory in common.

    All processes call this at once, each with the ``mesh`` of all and its ``rank``. Each thread has groups of its own,
    for in a group everything has one order; the thread that computes has the mesh's. Raises ParallelError where the
    system has no memory to have in common.
    """
    here, opposite = sets_along(mesh.mesh, REPLICA), sets_along(mesh.mesh, MACHINE)

    def group(sets: Sequence[list[int]], link: dist.ProcessGroup | None = None, **waiting: Any) -> ProcessGroup:
        """Returns that of the ``sets`` of ranks that this process is in; without a ``link`` all make all of them."""
        if all(len(ranks) == 1 for ranks in sets):
            return ONE_PROCESS
        own = _own(sets, rank)
        link = groups_of(sets, watch)[sets.index(own)] if link is None else link
        return DistributedGroup(link, own, rank, watch, **waiting)

    links = {name: mesh.get_group(name) for name in (REPLICA, MACHINE)}
    local = group(here, links[REPLICA])
    # Those of the same number on each machine have the same share of every layer.
    across = group(opposite, links[MACHINE])
    if local.world_size == 1 or across.world_size == 1:
        everyone = local if across.world_size == 1 else across
    else:
        everyone = group(sets_along(mesh.mesh, MACHINE, REPLICA))
    both: dict[str, Any] = {"awaited": {*_own(here, rank), *_own(opposite, rank)}}
    if local.world_size > 1 and not hasattr(os, "memfd_create"):
        raise ParallelError(
            "replicas here have memory in common by Linux's memfd_create (got a system without); use stages",
            ours=rank == 0,
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # each piece of common memory has a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Replicas(
        everyone,
        local,
        across,
        main=Lane(group(here, links[REPLICA], **both), group(opposite, links[MACHINE], **both)),
        gradients=Lane(group(here, beside=True, **both), group(opposite, beside=True, **both)),
        updates=Lane(group(here, beside=True)),
        written_back=Lane(group(here, beside=True)),
        common_memory=common_memory,
    )


def _own(sets: Sequence[list[int]], rank: int) -> list[int]:
    return next(ranks for ranks in sets if rank in ranks)


def common_memory(processes: ProcessGroup, length_bytes: int) -> Common:
    """Returns memory that all ``processes``, of one machine, have, all zero. It goes with the last that has it.

    Raises ParallelError where they do not want as much, and MemoryError where the system refuses it.
    """
    length = max(length_bytes, 1)
    descriptor, error = -1, ""
    if processes.rank == 0:
        try:
            descriptor = os.memfd_create("stronghold", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, length)
        except OSError as raised:
            error = str(raised)
    told = processes.all_gather_object((length, os.getpid(), descriptor))
    if len({one[0] for one in told}) > 1:
        raise ParallelError(
            f"replicas must need the same memory (got {', '.join(format_bytes(one[0]) for one in told)}); build "
            "the same model and optimizer in each"
        )
    if processes.rank:
        _, process, number = told[0]
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as raised:
            error = str(raised)
    try:
        mapped = None if error else mmap.mmap(descriptor, length)
    except OSError as raised:
        mapped, error = None, str(raised)
    errors = [one for one in processes.all_gather_object(error) if one]
    # From here on the first one's descriptor is not needed.
    if descriptor >= 0:
        os.close(descriptor)
    if mapped is None or errors:
        raise MemoryError(
            f"the system refused {format_bytes(length_bytes)} of memory to {processes.world_size} replicas in "
            f"common ({errors[0]}); start them as one user in one container, or use stages"
        )
    return Common(mapped, processes.world_size)
