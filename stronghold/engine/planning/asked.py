"""What a plan is asked for, as limits and as what may be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
from torch import nn

from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.engine.planning.searched import PlannedModel
from stronghold.native import return_free_memory
from stronghold.planner.machine_file import MachineFile
from stronghold.settings import (
    UPDATES,
    check_accumulate,
    check_activations,
    check_one_of,
    check_together,
    kept_layers,
)
from stronghold.unit import all_parameters
from stronghold.units import parse_bytes

MOST_PIECES = 64
"""Micro-batches of a layer that are looked at, at most."""
KEPTS = 32
"""Numbers of layers that keep their activations which are looked at, about."""
TRAINING_BYTES = 20 * 2**20
"""What PyTorch takes of the host beside tensors once it trains: code that is read in by then, and pools of products.

It was 17 MiB for a model of 3 MiB in fp32, and 30 in bf16 on a processor without products in it.
"""
RESERVED = 0.03
"""Of a device's memory, what is left to its driver and to holes between allocations."""


def limits(
    machine: MachineFile,
    model: nn.Module,
    device_memory: int | str | None,
    host_memory: int | str | None,
    processes: int = 1,
) -> Limits:
    """Returns what each of so many processes on the machine may take: without a number, of the host's memory as much.

    This process stands for all of them: each has in memory what this one has but for the model. Raises ValueError for a
    device's memory on a host, which has none of its own.
    """
    if machine.is_host and device_memory is not None:
        raise ValueError(
            f"device_memory is planned with where a device has memory of its own (got {device_memory} on "
            f"{machine.device_name}); pass host_memory there"
        )
    device = machine.device_memory_bytes
    if device_memory is not None:
        device = parse_bytes(device_memory)
    elif device is not None:
        device = int((1 - RESERVED) * device)
    host = int(0.9 * machine.host_memory_bytes) // processes if host_memory is None else parse_bytes(host_memory)
    return Limits(device=None if machine.is_host else device, host=host, process=process_bytes(model))


def process_bytes(model: nn.Module) -> int:
    """Returns what the process takes of memory but for the model: what it has, and what training adds beside tensors.

    The store takes the model's parameters over.
    """
    return_free_memory()  # the process is to count as what it holds
    parameters = [parameter for _, parameter in all_parameters(model) if parameter.is_cpu]
    own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return max(0, psutil.Process().memory_info().rss - sum(own.values())) + TRAINING_BYTES


def sizes(memory: ModelMemory, window: int | None, resident: int | None) -> dict[str, Any]:
    """Returns which windows and numbers of resident layers may be chosen; beside those a window has what is left."""
    layers = len(memory.units.layers)
    for name, value, least, most in (("window", window, 1, layers), ("resident", resident, 0, layers)):
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise ValueError(
                f"{name} must be a number of layers from {least} to {most} (got {value!r}); pass one, or None"
            )
    residents: Sequence[int] = range(layers + 1) if resident is None else (resident,)
    if window is not None and resident is not None:
        window = min(window, max(1, layers - resident))  # as offload() takes it
    return {"residents": residents, "windows": None if window is None else (window,)}


def kepts(
    activations: int | str | None, layers: int, *, may_keep: bool = True, resident: int | None = None
) -> Sequence[int]:
    """Returns how many layers may keep their activations, the last ones, where they ``may_keep`` them.

    Of many layers not every number is looked at, for each takes a search time: what is left out is 3 % of the layers.
    With their inputs in host memory or on disk all are recomputed. Raises ValueError for more than there are, and for
    layers that may not, unless all are ``resident``.
    """
    if activations is None:
        return (*range(0, layers, -(-layers // KEPTS)), layers) if may_keep else (0,)
    check_activations(activations)
    kept = kept_layers(activations, layers)
    if kept and not may_keep and resident != layers:
        raise ValueError(
            f"activations={activations!r} would hold, unpacked, all weights of the layers that keep theirs (got packed "
            f"weights and resident={resident}); pass activations='recompute' or 'host', or resident={layers}"
        )
    return (kept,)


def micro_batches(asked: int | str | None, planned: PlannedModel) -> tuple[int | None, ...]:
    """Returns the micro-batches that may be chosen, in samples, None for the whole batch."""
    if isinstance(asked, int) and asked < 1:
        raise ValueError(f"micro_batch must be samples, 1 or more (got {asked}); pass a number, None, or 'auto'")
    if asked is None or isinstance(asked, int):
        return (asked,)
    one_of("micro_batch", asked, ("auto",))
    batch, shapes = planned.computation.batch, [*planned.computation.leaders, *planned.input_shapes]
    if not planned.memory.can_be_cut or not all(_is_batch_first(shape, batch) for shape in shapes):
        return (None,)
    pieces = [2**n for n in range(1, MOST_PIECES.bit_length()) if 2**n <= batch]
    return None, *dict.fromkeys(-(-batch // count) for count in pieces)


def _is_batch_first(shape: Sequence[int], batch: int) -> bool:
    """Whether the first dimension alone can be that of the samples, so that no layer's sequence is taken for them."""
    return shape[0] == batch and batch not in shape[1:]


def updates_asked(update: str | None, accumulate: int | None) -> tuple[str, ...]:
    """Returns which updates may be chosen where a step adds up the gradients of so many batches.

    Raises ValueError for no number of batches, and for updates that add up none.
    """
    check_accumulate(accumulate)
    updates = UPDATES if update is None else (one_of("update", update, UPDATES),)
    check_together(update, accumulate)
    return updates if accumulate in (None, 1) else ("deferred",)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    check_one_of(name, value, choices)
    return value
