"""What a stage takes when its layers pass through a window: bytes on the device, and what it does beside computing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stronghold.planner.stage_disk import StageDisk, sums_of
from stronghold.planner.step_costs import Machine

Seconds = NDArray[np.floating[Any]]
Counts = NDArray[np.int64]
Layers = int | Counts
"""A number of a layer, or many."""
RESOURCES = ("computing", "fetches", "gradients", "updates", "disk")
"""What a stage does at the same time."""


@dataclass(frozen=True, kw_only=True)
class OffloadedLayer:
    """What one layer takes and moves, with the root parameters that are computed with it.

    ``slot_bytes`` is what its weights take in a slot and a fetch carries, ``gradient_bytes`` what its gradients take in
    a gradient slot and carry down behind each backward pass. ``root_bytes`` stay on the device throughout: root
    parameters with their gradients, and buffers. ``elements`` are those that the host updates once a step. Raises
    ValueError for a number that is negative or infinite.
    """

    slot_bytes: int
    gradient_bytes: int = 0
    root_bytes: int = 0
    elements: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of 0 or more (got {value!r}); ask the model again")


class Largest:
    """The largest of the values from one place to before another, of as many pairs of places at once as are asked."""

    def __init__(self, values: Sequence[int]) -> None:
        doubled = [np.array(values, np.int64)]
        while (step := 2 ** (len(doubled) - 1)) * 2 <= len(values):
            doubled.append(np.maximum(doubled[-1][:-step], doubled[-1][step:]))
        # Row k has the largest of 2^k values from each place on; behind its end no place is asked for.
        self._of_powers = np.zeros((len(doubled), len(values)), np.int64)
        for row, of_power in zip(self._of_powers, doubled, strict=True):
            row[: len(of_power)] = of_power

    def within(self, firsts: Layers, ends: Layers) -> Counts:
        """Returns the largest in each range, none of which is empty."""
        lengths = np.subtract(ends, firsts)
        power = np.frexp(lengths)[1] - 1
        return np.maximum(self._of_powers[power, firsts], self._of_powers[power, ends - (1 << power)])


class Times(NamedTuple):
    """Seconds of one micro-batch, by stage: of each pass, and of its computing alone.

    ``longest`` is the number in ``RESOURCES`` of what holds the stage up most.
    """

    forward_s: Seconds
    backward_s: Seconds
    computing_s: Seconds
    longest: NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class OffloadedStages:
    """A row of layers whose stages are each offloaded with a window of ``window`` layers, or fewer where it has fewer.

    On the device a stage has its window's slots, each as long as its longest layer, ``gradient_slots`` as long as its
    longest layer's gradients, and all its root: no more weights, however many layers it has. ``machine`` is what moves
    layers and updates them, with the share of its rates that a process has; without it they take no time. Several
    stages on one device have the window in common, which here each counts whole. Weights and states are in host memory,
    or on a ``disk``, and no layer is resident. Raises ValueError for a window below 1.

    A pass through n layers fetches n - ``window`` of them: the schedule turns back at the stage's end, where the last
    ones are still in the window, and finds the first ones there at its beginning (:class:`stronghold.schedule.Schedule`
    says so of accumulation, which micro-batches are). While a pass runs, the window is full of layers that it is still
    to compute, and so no pass can make use of the time of another one: each takes as long as what is longest in it,
    computing, fetching or reading from disk, and in a backward pass bringing gradients down. That is the bound of
    :func:`stronghold.planner.step_bound.step_bound`, pass by pass, with its rule that a window of one does not fetch
    while it computes. The first forward pass of a step has more to do: updates run beside it, and it fetches anew every
    layer that was updated, which the disk writes and reads. What that takes beyond an ordinary forward pass is the
    stage's once in a step, and is divided among the micro-batches here. A stage further back begins that pass later and
    so has some time more, which is not counted: what is balanced is the least that each stage takes by itself.
    """

    window: int
    layers: Sequence[OffloadedLayer]
    gradient_slots: int = 2
    machine: Machine | None = None
    disk: StageDisk | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise ValueError(
                f"window must be a whole number of layers, 1 or more (got {self.window!r}); pass one, such as 2"
            )

    def held_bytes(self, firsts: Layers, ends: Layers) -> Counts:
        """Returns what stages of the layers from ``firsts`` to before ``ends`` hold on the device, one array of both.

        Activations and what is received from neighbours are not in it.
        """
        slots = np.minimum(self.window, np.subtract(ends, firsts)) * self._slot_bytes.within(firsts, ends)
        gradients = self.gradient_slots * self._gradient_bytes.within(firsts, ends)
        return slots + gradients + self._root_bytes[ends] - self._root_bytes[firsts]

    def times(self, forward_s: Seconds, backward_s: Seconds, firsts: Layers, ends: Layers, micro_batches: int) -> Times:
        """Returns what those stages take if they compute for ``forward_s`` and ``backward_s``."""
        computing = np.zeros(np.shape(forward_s), np.intp)
        if self.machine is None:
            return Times(forward_s, backward_s, forward_s + backward_s, computing)
        fetched = self._fetch_s[ends] - self._fetch_s[np.minimum(np.add(firsts, self.window), ends)]
        again = self._fetch_s[np.maximum(np.subtract(ends, self.window), firsts)] - self._fetch_s[firsts]
        gradients = self._gradients_s[ends] - self._gradients_s[firsts]
        updates = self._updates_s[ends] - self._updates_s[firsts]
        changed = self._changed_s[ends] - self._changed_s[firsts]
        if self.window == 1:
            fetched, again, changed = fetched + forward_s, again + backward_s, changed + forward_s
        forward, once = np.maximum(forward_s, fetched), np.maximum(updates, changed)
        backward = np.maximum(np.maximum(backward_s, again), gradients)
        # What is longer than the computation beside it holds the stage up; of several, the one that does so most.
        held_up = [
            computing,
            np.maximum(0.0, fetched - forward_s) + np.maximum(0.0, again - backward_s),
            np.where(gradients > again, np.maximum(0.0, gradients - backward_s), 0.0),
        ]
        if self.disk is None:
            late = (np.maximum(forward, once) - forward) / micro_batches
            held_up.append(late)
        else:
            read, read_again, on_disk = self.disk.times(forward_s, backward_s, firsts, ends)
            forward, backward = np.maximum(forward, read), np.maximum(backward, read_again)
            late = (np.maximum(forward, np.maximum(once, on_disk)) - forward) / micro_batches
            held_up.append(np.where(on_disk > once, 0.0, late))
            passes = np.maximum(0.0, read - forward_s) + np.maximum(0.0, read_again - backward_s)
            held_up.append(passes + np.where(on_disk > once, late, 0.0))
        return Times(forward + late, backward, forward_s + backward_s, np.stack(held_up).argmax(axis=0))

    def least_sums(self, forward_s: Seconds, backward_s: Seconds, micro_batches: int) -> list[tuple[Seconds, float]]:
        """Returns sums over the first n layers, with seconds that a stage's own sum of each may exceed its time by.

        They are what a forward pass takes at the least, with its part of a step's updates, and a backward pass. The
        seconds are what a stage finds in its window, at the most.
        """
        if self.machine is None:
            return [(forward_s + backward_s, 0.0)]
        found_s = self.window * float(np.diff(self._fetch_s).max(initial=0.0))
        beside = self.window == 1
        changed_s = self._changed_s + beside * forward_s
        forward = [
            (forward_s, 0.0),
            (self._fetch_s + beside * forward_s, found_s),
            *(
                ((1 - 1 / micro_batches) * forward_s + once_s / micro_batches, 0.0)
                for once_s in (self._updates_s, changed_s)
            ),
        ]
        backward = [(backward_s, 0.0), (self._fetch_s + beside * backward_s, found_s), (self._gradients_s, 0.0)]
        if self.disk is not None:
            read, once = self.disk.least_sums()
            forward += [read, ((1 - 1 / micro_batches) * forward_s + once / micro_batches, 0.0)]
            backward.append(read)
        return [(one + other, found + again) for (one, found), (other, again) in product(forward, backward)]

    def least_s(self, stages: int) -> tuple[float, float, float]:
        """Returns the least of a pass's fetches, its gradients and a step's updates in so many stages together.

        What the disk does for fetches, and for updates, counts as theirs.
        """
        if self.machine is None:
            return 0.0, 0.0, 0.0
        stay_s = stages * self.window * float(np.diff(self._fetch_s).max(initial=0.0))
        read_s, once_s = (0.0, 0.0) if self.disk is None else self.disk.least_s(stages)
        fetches_s, updates_s = max(read_s, self._fetch_s[-1] - stay_s), max(once_s, float(self._updates_s[-1]))
        return fetches_s, float(self._gradients_s[-1]), updates_s

    @cached_property
    def _slot_bytes(self) -> Largest:
        return Largest([layer.slot_bytes for layer in self.layers])

    @cached_property
    def _gradient_bytes(self) -> Largest:
        return Largest([layer.gradient_bytes for layer in self.layers])

    @cached_property
    def _root_bytes(self) -> Counts:
        return np.array([0, *accumulate(layer.root_bytes for layer in self.layers)], np.int64)

    @cached_property
    def _fetch_s(self) -> Seconds:
        return sums_of([self._fetch_of(layer) for layer in self.layers])

    @cached_property
    def _changed_s(self) -> Seconds:
        return sums_of([self._fetch_of(layer) if layer.elements else 0.0 for layer in self.layers])

    @cached_property
    def _gradients_s(self) -> Seconds:
        down_s = self._known_machine.down_s
        return sums_of([down_s(one.gradient_bytes) if one.gradient_bytes else 0.0 for one in self.layers])

    @cached_property
    def _updates_s(self) -> Seconds:
        return sums_of([layer.elements * self._known_machine.host_update_ns * 1e-9 for layer in self.layers])

    def _fetch_of(self, layer: OffloadedLayer) -> float:
        return self._known_machine.copy_s + layer.slot_bytes / self._known_machine.h2d_bytes_per_s

    @property
    def _known_machine(self) -> Machine:
        assert self.machine is not None
        return self.machine
