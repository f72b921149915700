"""The processes that train one model together, and what they say to one another beside tensors of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stronghold.distributed.distributed_group import DistributedGroup
from stronghold.distributed.machine import this_machine
from stronghold.distributed.mesh import REPLICA, STAGE, mesh_of, ranks_by_place, sets_along
from stronghold.distributed.replica_groups import replicas_of
from stronghold.distributed.watch import watch_over
from stronghold.errors import ParallelError
from stronghold.unit import ONE_REPLICA, Replicas
from stronghold.version import __version__

VERSIONS = {"version of stronghold": __version__, "version of PyTorch": str(torch.__version__)}
"""What every process must have alike before anything else can be compared."""


def backend_for(device: torch.device) -> str:
    """Returns the backends of torch.distributed by which processes send what is on the host and on their devices.

    Raises ParallelError for a kind of device that PyTorch has none for.
    """
    if device.type == "cpu":
        return "gloo"
    try:
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    except ValueError as error:
        raise ParallelError(
            f"processes send to one another what is on their devices (got {device.type!r}, for which PyTorch has no "
            "backend); train in one process there, or by several on CPUs or CUDA devices"
        ) from error


class Processes(DistributedGroup):
    """All processes of ``torch.distributed``, joined as torchrun tells where they are not yet.

    Of ``replicas`` each holds the whole model: process r * n + p is number p of the n of replica r; None makes each
    process one. ``device`` is where this one's layers compute: of a kind without a number, as "cuda", the GPU of its
    rank on its machine. ``wanted`` are the processes that the user asked for, as far as that is known. Raises
    ParallelError where this process was not started by torchrun, where the port at which processes meet is in use,
    where they are not of the same versions or cannot be so many replicas, and for a device without a backend.
    """

    def __init__(self, device: torch.device, *, wanted: int, replicas: int | None = 1) -> None:
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                raise ParallelError(
                    f"stages and replicas are processes that are started together (got one that is alone, and {wanted} "
                    f"are wanted); start it with torchrun --nproc-per-node {wanted}"
                )
            store, rank, count = _meet()
            # After a restart torchrun's store still has the addresses of the processes before, which gloo would take.
            store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=count)
        rank, count = dist.get_rank(), dist.get_world_size()
        if device.type != "cpu":
            if device.index is None:  # each process of a machine has a GPU of its own
                device = torch.device(device.type, dist.get_node_local_rank(fallback_rank=0))
            torch.get_device_module(device).set_device(device)
        self.device = device
        super().__init__(None, range(count), rank, watch_over(rank, count))
        self.agree(VERSIONS)
        self._machines = self.all_gather_object(this_machine())
        self.local_world_size = self._machines.count(self._machines[self.rank])
        replicas = self.world_size if replicas is None else replicas
        if replicas < 1 or self.world_size % replicas:
            self.refuse(
                f"the replicas must divide the processes (got {replicas} replicas and {self.world_size} processes); "
                f"start torchrun with --nproc-per-node {wanted}"
            )
        self.each = self.world_size // replicas
        """The processes of a replica."""
        self.replica, self.place = divmod(self.rank, self.each)
        try:
            self._ranks = ranks_by_place(self._machines, self.each)
        except ValueError as error:
            self.refuse(str(error))

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes by machine, replica on it and stage. To be asked for by all at once."""
        return mesh_of(self._ranks, self.device.type, self.watch)

    @cached_property
    def replicas(self) -> Replicas:
        """This process and those that have the same layers. To be asked for by all processes at once."""
        if self.world_size == self.each:
            return ONE_REPLICA
        return replicas_of(self.mesh, self.rank, self.watch)

    @cached_property
    def stage_group(self) -> dist.ProcessGroup:
        """The processes of this replica, through which micro-batches pass. To be asked for by all at once."""
        return self.mesh.get_group(STAGE)

    def folders(self, directories: Sequence[str]) -> list[str]:
        """Returns, below the ``directories`` of a store, those of the replicas here that have this one's layers.

        On no machine has any other process the same, so that machines may see one another's files.
        """
        first = next(ranks[0] for ranks in sets_along(self._ranks, REPLICA) if self.rank in ranks)
        return [os.path.join(path, f"process-{first}") for path in directories]

    @property
    def stage_ranks(self) -> range:
        """The ranks of this replica's processes."""
        return range(self.rank - self.place, self.rank - self.place + self.each)

    def draw_apart(self) -> None:
        """Has each replica but the first, with all its stages, draw random numbers of its own, on host and device."""
        if self.replica:
            torch.manual_seed(torch.initial_seed() + self.replica)

    def refuse(self, message: str) -> NoReturn:
        """Raises a ParallelError that every process raises; the first one's is the one to be told."""
        raise ParallelError(message, ours=self.rank == 0)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises ParallelError unless ``facts`` are the same in all processes."""
        everyone = self.all_gather_object(dict(facts))
        for rank, others in enumerate(everyone):
            for name, ours in everyone[0].items():
                if others.get(name) != ours:
                    self.refuse(
                        f"all processes must have the same {name} (got {ours!r} in process 0 and {others.get(name)!r} "
                        f"in process {rank}); start all of them with the same arguments and versions"
                    )

    def same(self, value: int, *, changed: bool = False) -> tuple[bool, bool]:
        """Returns whether all processes have the same ``value``, and whether any has ``changed`` what it tells of."""
        extremes = torch.tensor([value, -value, changed], device="cpu")
        self.all_reduce(extremes, "max")
        return bool(extremes[0] == -extremes[1]), bool(extremes[2])

    def mean(self, value: Tensor | None) -> Tensor:
        """Returns, in all processes, the mean of the scalars that the last one of each replica has: fp32, on the host.

        Who has it tells the others, and waits for none of them: in a pipeline they end their steps later.
        """
        mean = torch.tensor(0.0 if value is None else value.item(), dtype=torch.float64, device="cpu")
        last = self.place == self.each - 1
        if last and self.replicas.world_size > 1:
            self.replicas.main.mean(mean)
        if self.each > 1:
            group = self.stage_group
            with self.watch.waiting(self.stage_ranks):
                dist.broadcast(mean, self.stage_ranks[-1], group=group)
        return mean.float()


def _meet() -> tuple[dist.Store, int, int]:
    """Returns the store that all processes share, this one's rank, and their number."""
    try:
        return next(dist.rendezvous("env://"))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ParallelError(
            f"processes meet at a port that nobody else listens at (got {os.environ['MASTER_PORT']}, which is in use: "
            "by another run?); start torchrun with another --master-port, or with --standalone, which takes a free one"
        ) from error
