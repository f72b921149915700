"""What stages have on disk where their host memory does not hold it, and what the disk does for that in a step."""

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


class OnHost(NamedTuple):
    """What a layer has on the host, with the root parameters beside it that are updated there.

    Its weights and its ``states`` (remainders and moments) may be on disk. ``most_states`` are the same with moments
    in their largest format, by which they are placed; ``stays`` is always in memory: gradients, and root weights.
    """

    weights: int = 0
    states: int = 0
    most_states: int = 0
    stays: int = 0
    trained: bool = True

    @classmethod
    def of(cls, model: ModelBytes, resident: Collection[int], states: str) -> OnHost:
        """Returns what a model of one layer has there, of which some units are ``resident``."""
        (layer,), units = model.layers, [unit for number, unit in enumerate(model.units) if number not in resident]
        return cls(
            weights=layer.slot,
            states=sum(unit.remainders + unit.moments.get(states, 0) for unit in units),
            most_states=sum(unit.remainders + max(unit.moments.values(), default=0) for unit in units),
            stays=sum(unit.gradients + unit.weights * unit.is_root for unit in units),
            trained=layer.trained,
        )


class DiskTimes(NamedTuple):
    """Seconds that a disk reads in each pass, and that it reads and writes beside a step's first forward pass."""

    forward_s: Sums
    backward_s: Sums
    once_s: Sums


@dataclass(frozen=True, kw_only=True)
class StageDisk:
    """The disk of stages with a window of ``window`` layers, whose host memory has ``room_bytes`` for one of them.

    That room is of all ``replicas`` of a stage, who have in common what is there; each reads the weights, and updates
    its part. As in :func:`stronghold.planner.step_bytes.parts_on_disk` what stays in memory anyway comes first, then
    weights, then states, from the first layer on; here a layer may be on disk in part. A pass does not read what it
    finds in the window, and of what an update changes all is read anew. A window of one does not read while it
    computes, unless layers are ``staged`` in host memory on their way.
    """

    window: int
    layers: Sequence[OnHost]
    machine: Machine
    room_bytes: float = 0.0
    replicas: int = 1
    staged: bool = True

    def times(self, forward_s: Sums, backward_s: Sums, firsts: Layers, ends: Layers) -> DiskTimes:
        """Returns what the disk does for stages from ``firsts`` to before ``ends`` that compute so long."""
        sums = self._sums
        weights = sums.weights[ends] - sums.weights[firsts]
        room = self.room_bytes - (sums.stays[ends] - sums.stays[firsts])
        there = np.clip(weights - room, 0.0, weights)
        behind_the_window = sums.weights[ends] - sums.weights[np.minimum(np.add(firsts, self.window), ends)]
        at_the_end = sums.weights[ends] - sums.weights[np.maximum(np.subtract(ends, self.window), firsts)]
        most_states = sums.most_states[ends] - sums.most_states[firsts]
        out = np.clip(most_states - np.maximum(0.0, room - weights), 0.0, most_states)
        states = sums.states[ends] - np.interp(sums.most_states[ends] - out, sums.most_states, sums.states)
        trained = sums.trained[ends] - np.interp(sums.weights[ends] - there, sums.weights, sums.trained)
        read_s, both_s = 1 / self.machine.disk_read_bytes_per_s, self._both_s
        forward = np.minimum(there, behind_the_window) * read_s
        backward = np.maximum(0.0, there - at_the_end) * read_s
        once = trained * read_s + (trained + states) / self.replicas * both_s
        if self.window == 1 and not self.staged:
            forward, backward, once = forward + forward_s, backward + backward_s, once + forward_s
        return DiskTimes(forward, backward, once)

    def least_sums(self) -> tuple[tuple[Sums, float], tuple[Sums, float]]:
        """Returns the seconds of a pass and of the first forward pass, as sums over the first n layers.

        Beside each is by how much a stage's own sum may exceed what the disk does for it: for what its memory holds,
        and for what it finds in its window.
        """
        sums, read_s = self._sums, 1 / self.machine.disk_read_bytes_per_s
        room = max(0.0, self.room_bytes)
        found = room + self.window * float(np.diff(sums.weights).max(initial=0.0))
        once = sums.trained * (read_s + self._both_s / self.replicas) + sums.states / self.replicas * self._both_s
        return (sums.weights * read_s, found * read_s), (once, room * (read_s + self._both_s / self.replicas))

    def least_s(self, stages: int) -> tuple[float, float]:
        """Returns the least of a pass and of the first forward pass in so many stages together."""
        return tuple(max(0.0, float(sums[-1]) - stages * beyond) for sums, beyond in self.least_sums())  # type: ignore[return-value]

    @property
    def _both_s(self) -> float:
        return 1 / self.machine.disk_read_bytes_per_s + 1 / self.machine.disk_write_bytes_per_s

    @cached_property
    def _sums(self) -> _Sums:
        columns = zip(*((*one[:4], one.weights * one.trained) for one in self.layers), strict=True)
        return _Sums(*(np.array([0.0, *accumulate(column)]) for column in columns))


class _Sums(NamedTuple):
    """Bytes of the first n layers; ``trained`` are the weights of those that are."""

    weights: Sums
    states: Sums
    most_states: Sums
    stays: Sums
    trained: Sums
