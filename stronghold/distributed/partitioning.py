"""Which layers go to which stage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stronghold.distributed.layered_model import LayeredModel
from stronghold.distributed.measuring import measure
from stronghold.distributed.offloaded_layers import machine_known, offloaded_stages
from stronghold.distributed.stage_clock import planned_stages
from stronghold.errors import ParallelError
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import messages_s
from stronghold.planner.partition import equal_sizes, partition
from stronghold.planner.partition_file import partition_of, read_partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.step_times import PlannedStage

BALANCES = ("time", "memory", "layers")
"""What stages can have in equal parts, as nearly as layers allow."""

Balance = str | os.PathLike[str] | Sequence[int] | Mapping[str, Sequence[Any]]


class Chosen(NamedTuple):
    """The layers of each stage, how many at its end are recomputed, where a file says that, and what was planned."""

    sizes: list[int]
    recomputed: list[int] | None = None
    planned: Sequence[PlannedStage] = ()


def choose_stages(
    layered: LayeredModel,
    order: Pipeline,
    balance: Balance,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    activations: str | None = None,
    window: int | str | None = None,
    machine: MachineFile | str | os.PathLike[str] | None = None,
    here: int = 1,
    replicas: int = 1,
) -> Chosen:
    """Returns where the row is cut.

    ``"time"`` and ``"memory"`` measure every layer with the first micro-batch of ``inputs`` and ``targets``, which are
    those of all ``replicas``, and are the least of the slowest stage and of the fullest (stronghold.planner.partition),
    with all layers recomputed unless ``activations`` are kept. With a ``window`` of so many layers, what a stage has on
    the device is that window rather than all its weights; and its fetches and updates count beside computing where
    ``machine``, what was measured of the machine that ``here`` processes are on, or what is kept of this one, has their
    rates. ``"layers"`` gives each stage as many, the first ones one more where they do not divide. Where there is but
    one partition nothing is measured. Raises ParallelError where the numbers do not make up the row, or there is
    nothing to measure with, and what stages_of and machine_known raise.
    """
    recomputed: list[int] | None = None
    if isinstance(balance, (os.PathLike, Mapping)) or (isinstance(balance, str) and balance not in BALANCES):
        balance, recomputed = stages_of(balance, activations)
    layers, stages = len(layered.layers), order.stages
    if stages > layers:
        raise ParallelError(
            f"each stage needs at least one layer (got stages={stages}, layers={layers}); pass at most {layers} stages"
        )
    if not isinstance(balance, str):
        return Chosen(_checked(list(balance), stages, layers), recomputed)
    if balance == "layers" or stages in (1, layers):
        return Chosen(equal_sizes(layers, stages))
    if inputs is None:
        raise ParallelError(
            f"balance={balance!r} measures each layer with a batch like those that will come (got none); pass it as "
            "inputs=, or balance='layers' for as many layers in each stage, or a list of how many"
        )
    costs = measure(
        layered,
        first_micro_batch(inputs, order.micro_batches, replicas),
        None if targets is None else first_micro_batch(targets, order.micro_batches, replicas),
        device=device,
        dtype=dtype,
    )
    offloaded, known = None, machine_known(machine, device)
    if isinstance(window, int):
        offloaded = offloaded_stages(layered, window, device=device, dtype=dtype, machine=known, processes=here)
    ratio = 0 if activations == "keep" else 1
    found = partition(costs, order, balance=balance, recompute_ratio=ratio, receive_buffers=True, offloaded=offloaded)
    link_s = messages_s(known, [costs[stage.first].input_bytes for stage in found.stages[1:]])
    return Chosen([stage.layers for stage in found.stages], planned=planned_stages(found, order, link_s))


def first_micro_batch(batch: Tensor, micro_batches: int, replicas: int) -> Tensor:
    """Returns the first micro-batch of so many in each replica. Raises ParallelError where a batch does not divide."""
    parts = micro_batches * replicas
    if not len(batch) or len(batch) % parts:
        each = f" in each of {replicas} replicas" if replicas > 1 else ""
        raise ParallelError(
            f"the micro-batches must divide the batch (got a batch of {len(batch)} samples and {micro_batches} "
            f"micro-batches{each}); pass a batch of a multiple of {parts} samples"
        )
    return batch[: len(batch) // parts]


def stages_of(
    partition: str | os.PathLike[str] | Mapping[str, Sequence[Any]], activations: str | None
) -> tuple[list[int], list[int]]:
    """Returns the layers of each stage, and how many of them, from its end, are recomputed, as vPipe's file says it.

    ``partition`` is the file's path, or what is in it.

    ``activations`` is what the user asks for: of those that are recomputed, for the file says which they are. Raises
    ParallelError for "keep" where the file has any recomputed, and for "host" and "disk" where it has none; ValueError
    where there is no partition in it.
    """
    if isinstance(partition, str) and not Path(partition).exists():
        raise ParallelError(
            f"balance must be {', '.join(map(repr, BALANCES))}, the layers of each stage, or a partition's file (got "
            f"{partition!r}, and there is no such file); pass one of them"
        )
    if isinstance(partition, Mapping):
        try:
            file, named = partition_of(partition), "balance"
        except ValueError as error:
            raise ParallelError(
                f"balance={partition!r} is no partition: {error}; pass one such as "
                '{"partition": [26, 23], "recompute_ratio": [1, 1]}'
            ) from error
    else:
        file, named = read_partition(os.fspath(partition)), repr(os.fspath(partition))
    if activations in (("keep",) if any(file.recomputed) else ("host", "disk")):
        raise ParallelError(
            f"activations must be what the partition asks for (got activations={activations!r} and "
            f"recompute_ratio={list(file.recompute_ratio)} in {named}, by which {sum(file.recomputed)} of "
            f"{sum(file.partition)} layers are recomputed); leave one of them out: pass no activations=, or "
            f"balance={list(file.partition)}"
        )
    return list(file.partition), list(file.recomputed)


def _checked(sizes: list[int], stages: int, layers: int) -> list[int]:
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        raise ParallelError(
            f"a partition must give each of {stages} stages a layer or more, and {layers} in all (got {sizes}, which "
            f"are {len(sizes)} stages and {sum(sizes)} layers); pass other numbers, or balance='time'"
        )
    return sizes
