"""What a disk does in a step of stages whose layers are on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stronghold.planner.model_bytes import ModelBytes
from stronghold.planner.step_costs import Machine

Sums = NDArray[np.floating[Any]]
Layers = int | NDArray[np.int64]
"""A number of a layer, or many."""


class OnDisk(NamedTuple):
    """What a layer has on disk: its weights, and the bytes that an update reads and writes back.

    Those are its weights, remainders and moments if it is ``trained``, and what root parameters beside it have there.
    """

    weights: int = 0
    updated: int = 0
    trained: bool = True

    @classmethod
    def of(cls, model: ModelBytes, resident: Collection[int], states: str) -> OnDisk:
        """Returns what a model of one layer has there, of which some units are ``resident``."""
        (layer,), units = model.layers, [unit for number, unit in enumerate(model.units) if number not in resident]
        updated = sum(unit.remainders + unit.moments.get(states, 0) for unit in units if unit.trained)
        return cls(layer.slot, updated + layer.trained * layer.weights, layer.trained)


class DiskTimes(NamedTuple):
    """Seconds that a disk reads in each pass, and that it reads and writes beside a step's first forward pass."""

    forward_s: Sums
    backward_s: Sums
    once_s: Sums


@dataclass(frozen=True, kw_only=True)
class StageDisk:
    """The disk of stages with a window of ``window`` layers, each of whose ``replicas`` updates its part.

    A pass does not read what it finds in the window, and of what an update changes all is read anew. A window of one
    does not read while it computes, unless layers are ``staged`` in host memory on their way.
    """

    window: int
    layers: Sequence[OnDisk]
    machine: Machine
    replicas: int = 1
    staged: bool = True

    def times(self, forward_s: Sums, backward_s: Sums, firsts: Layers, ends: Layers) -> DiskTimes:
        """Returns what the disk does for stages from ``firsts`` to before ``ends`` that compute so long."""
        read, once = self._read_s, self._once_s[ends] - self._once_s[firsts]
        forward = read[ends] - read[np.minimum(np.add(firsts, self.window), ends)]
        backward = read[np.maximum(np.subtract(ends, self.window), firsts)] - read[firsts]
        if self.window == 1 and not self.staged:
            forward, backward, once = forward + forward_s, backward + backward_s, once + forward_s
        return DiskTimes(forward, backward, once)

    def least_sums(self) -> tuple[tuple[Sums, float], Sums]:
        """Returns the seconds of a pass and of the first forward pass, as sums over the first n layers.

        Beside those of a pass is by how much a stage's own sum may exceed what it reads: for what is in its window.
        """
        return (self._read_s, self.window * float(np.diff(self._read_s).max(initial=0.0))), self._once_s

    def least_s(self, stages: int) -> tuple[float, float]:
        """Returns the least of a pass and of the first forward pass in so many stages together."""
        (read_s, found_s), once_s = self.least_sums()
        return max(0.0, float(read_s[-1]) - stages * found_s), float(once_s[-1])

    @cached_property
    def _read_s(self) -> Sums:
        return sums_of([one.weights / self.machine.disk_read_bytes_per_s for one in self.layers])

    @cached_property
    def _once_s(self) -> Sums:
        read_s, write_s = 1 / self.machine.disk_read_bytes_per_s, 1 / self.machine.disk_write_bytes_per_s
        return sums_of(
            [
                one.trained * one.weights * read_s + one.updated / self.replicas * (read_s + write_s)
                for one in self.layers
            ]
        )


def sums_of(values: Sequence[float]) -> Sums:
    """Returns the sums of the first n values, from none to all."""
    return np.array([0.0, *accumulate(values)])
