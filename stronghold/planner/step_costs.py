"""What a training step is made of, in numbers: the work of its layers, the machine's rates, and the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Resource(IntEnum):
    """Who works: each does its operations one after the other, in the order in which they were given to it.

    ``HOST`` is the thread that issues everything, where that is not the one that computes. The others have the names
    of the device's streams: ``FETCHES`` and ``ROOT`` copy to the device, ``GRADIENTS`` from there, ``UPDATES`` is the
    optimizer on the host, ``READS`` reads layers from disk before their fetch, ``SETTLED`` waits until what an update
    wrote has arrived on disk, and ``DISK`` is the disk itself. ``ITERATIONS`` is the device at Muon's matrices, beside
    the computation, and ``INPUTS`` writes layers' inputs to disk and reads them again.
    """

    HOST = 0
    COMPUTE = 1
    FETCHES = 2
    ROOT = 3
    GRADIENTS = 4
    UPDATES = 5
    READS = 6
    SETTLED = 7
    DISK = 8
    ITERATIONS = 9
    INPUTS = 10


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """What one unit's parameters do in a step, under the settings at hand.

    ``forward_s`` and ``backward_s`` are seconds of computation over the whole batch, all micro-batches together;
    ``backward_s`` contains the second run of a layer that is recomputed, and ``first_gradient_s`` is how much of it
    goes by before the first gradient is written to a gradient slot. ``weight_bytes`` go to the device: of a layer at
    each fetch, of a root parameter behind its update. ``gradient_bytes`` come down, of a layer in each pass with its
    gradients' squares and of a root parameter before its update. ``elements`` are the trained ones, which it updates;
    ``ring_bytes`` is what that reads from disk and writes back, 0 where it finds everything in memory. ``matrices`` are
    those that Muon updates, and ``iteration_s`` what the device takes for all their iterations. ``add_s`` is what it
    takes to add gradients to those of a pass before, where they stay there.

    Raises ValueError for a number that is negative or infinite.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    first_gradient_s: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    elements: int = 0
    ring_bytes: int = 0
    matrices: int = 0
    iteration_s: float = 0.0
    add_s: float = 0.0

    def __post_init__(self) -> None:
        values = vars(self).values()
        if min(values) < 0 or not math.isfinite(sum(values)):
            name, value = next((name, value) for name, value in vars(self).items() if not 0 <= value < math.inf)
            raise ValueError(f"{name} must be a number of 0 or more (got {value!r}); measure the model again")
        if self.first_gradient_s > self.backward_s:
            raise ValueError(
                f"first_gradient_s must be within the backward pass (got {self.first_gradient_s} of {self.backward_s}"
                " s); measure the model again"
            )


@dataclass(frozen=True, kw_only=True)
class LayerWork(UnitWork):
    """The same of one layer. ``on_disk`` tells that its weights are fetched from there.

    ``input_bytes`` are those of its inputs, of all micro-batches, that wait for the backward pass beside the device:
    in host memory, or with ``inputs_on_disk`` there. A ``recomputed`` one is issued again in its backward pass.
    """

    on_disk: bool = False
    recomputed: bool = False
    input_bytes: int = 0
    inputs_on_disk: bool = False


@dataclass(frozen=True, kw_only=True)
class RootWork(UnitWork):
    """The same of a root parameter: used before the layers (``first``) or behind them, and updated on the host.

    A ``resident`` one is updated on the device. One without ``elements`` is what is computed outside the layers.
    """

    first: bool
    resident: bool = False


DEVICE_IS_ONE = {
    (Resource.COMPUTE, Resource.ITERATIONS): 2.0,
    (Resource.ITERATIONS, Resource.COMPUTE): 2.0,
}
"""Layers and Muon's iterations share the device's arithmetic."""
CORES_ARE_ONE = {
    pair: 2.0
    for other in (Resource.UPDATES, Resource.FETCHES, Resource.GRADIENTS)
    for pair in ((Resource.COMPUTE, other), (other, Resource.COMPUTE))
}
"""Where the host computes, layers share its cores with updates and copies: a layer stands still as long as they take.

All of its threads wait for each one. With two cores it was 1.0 to 1.6 times what an update takes alone, and 0.7 to 1.3
times a copy by one thread (benchmarks/NOTES.md).
"""
LINK_UP_IS_ONE = {(Resource.FETCHES, Resource.ROOT): 2.0, (Resource.ROOT, Resource.FETCHES): 2.0}
"""Copies of layers and of root parameters share the link to the device."""


class UpdateParts(NamedTuple):
    """The seconds of an update on the host: of AdamW's all are ``others_s``.

    Of Muon's, each matrix's momentum comes before its iteration, and its step behind: the iterations begin when the
    ``first_s`` momentum is there, the host goes on with ``others_s`` meanwhile, and the ``last_s`` step waits for both.
    The matrices of a unit count as alike, each with half of its work before its iteration.
    """

    first_s: float
    iterations_s: float
    others_s: float
    last_s: float


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """Seconds that the engine itself takes of the thread that issues a step, for each layer.

    Of a pass over each micro-batch: of a resident layer forward and backward, of a streamed one, and of one that is
    computed again in the backward pass, beside that. ``update_s`` is an update's, wherever it is carried out.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    streamed_forward_s: float = 0.0
    streamed_backward_s: float = 0.0
    again_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine sustains, each resource at work alone.

    ``h2d_bytes_per_s`` and ``d2h_bytes_per_s`` are the link's two ways, or the copies into slots and out of them where
    the device's memory is the host's; ``copy_s`` is what each copy takes beside its bytes. ``host_update_ns`` is per
    element and update, with the threads and in the format at hand, and ``host_add_ns`` per element of gradients that
    are added to those of a pass before; ``device_update_ns`` is the update of resident layers.
    Units with matrices that Muon updates have ``muon_host_ns`` and ``muon_device_ns`` in their place, where given.
    ``reduce_s`` is what gradients take on their way down beside ``copy_s`` and their bytes, where replicas add them up.
    ``iterates_beside`` tells that the device iterates Muon's matrices while the host goes on with others; where the
    host computes, the thread that updates does it itself. ``launch_s`` is what the host needs to issue one pass
    of a layer over one micro-batch, and ``host_work`` what the engine adds to it, which the device does not wait for
    where it ``runs_behind`` the host, as a GPU does.

    ``slowed`` says how many times as long an operation of the first resource takes while one of the second is under
    way; where several are, the factors multiply.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_update_ns: float
    device_update_ns: float = 0.0
    host_add_ns: float = 0.0
    muon_host_ns: float | None = None
    muon_device_ns: float | None = None
    copy_s: float = 0.0
    reduce_s: float = 0.0
    launch_s: float = 0.0
    host_work: HostWork = HostWork()
    runs_behind: bool = True
    iterates_beside: bool = True
    disk_read_bytes_per_s: float = math.inf
    disk_write_bytes_per_s: float = math.inf
    slowed: Mapping[tuple[Resource, Resource], float] = field(default_factory=lambda: dict(LINK_UP_IS_ONE))

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name} must be more than 0 (got {value!r}); probe the machine again")
        for name in ("host_update_ns", "device_update_ns", "host_add_ns", "copy_s", "reduce_s", "launch_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a number of 0 or more (got {value!r}); probe the machine again")
        if any(not 1 <= factor < math.inf for factor in self.slowed.values()):
            raise ValueError(f"slowed must hold factors of 1 or more (got {self.slowed!r}); probe the machine again")

    def parts_s(self, unit: UnitWork) -> UpdateParts:
        """Returns what an update on the host consists of."""
        host_s = unit.elements * _of(unit, self.host_update_ns, self.muon_host_ns) * 1e-9
        if not unit.matrices:
            return UpdateParts(0.0, 0.0, host_s, 0.0)
        if not self.iterates_beside:
            return UpdateParts(0.0, 0.0, host_s + unit.iteration_s, 0.0)
        end_s = host_s / (2 * unit.matrices)
        return UpdateParts(end_s, unit.iteration_s, host_s - 2 * end_s, end_s)

    def on_device_s(self, unit: UnitWork) -> float:
        """Returns what the update of a resident unit takes of the computation."""
        return unit.elements * _of(unit, self.device_update_ns, self.muon_device_ns) * 1e-9 + unit.iteration_s

    def update_s(self, unit: UnitWork) -> float:
        """Returns the least that it takes from its beginning to its end."""
        first_s, iterations_s, others_s, last_s = self.parts_s(unit)
        return first_s + max(iterations_s, others_s) + last_s

    def down_s(self, gradient_bytes: int) -> float:
        """Returns what a unit's gradients take on their way to the host, nothing where there is no way."""
        return self.copy_s + self.reduce_s + gradient_bytes / self.d2h_bytes_per_s if gradient_bytes else 0.0

    def up_s(self, weight_bytes: int) -> float:
        """The same of a root parameter's weights on their way to the device."""
        return self.copy_s + weight_bytes / self.h2d_bytes_per_s if weight_bytes else 0.0


def _of(unit: UnitWork, ns: float, muon_ns: float | None) -> float:
    return ns if muon_ns is None or not unit.matrices else muon_ns


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that decide what is issued when; those that change a layer's work alone are in ``LayerWork``.

    ``resident`` are the numbers of the layers that stay on the device. ``pieces`` is the number of micro-batches that
    a layer runs over. ``staged`` tells that layers on disk pass through host memory on their way to the device. A step
    has so many ``passes``, forward and backward, whose gradients are added up, which ``in_backward`` does not take.
    """

    window: int
    resident: Sequence[int] = ()
    in_backward: bool = False
    pieces: int = 1
    staged: bool = True
    passes: int = 1
