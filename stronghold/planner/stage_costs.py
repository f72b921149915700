"""What any run of layers takes as any stage: seconds and bytes, with as much recomputation as its memory asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stronghold.planner.machine_file import Spread
from stronghold.planner.offloaded_stages import Counts, Largest, Layers, OffloadedStages, Seconds, Times

LimitBytes = float | NDArray[np.floating[Any]]
"""Bytes that a stage may take, or each of many."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer takes: seconds and bytes of one micro-batch, and the bytes that it takes whatever passes through.

    ``weight_bytes`` is everything that does not depend on the micro-batches: what of weights, gradients and states is
    in the memory that is to be planned. ``activation_bytes`` is what is kept of a micro-batch between its forward and
    its backward pass, ``input_bytes`` what enters the layer: it comes over the link where the layer is a stage's first,
    and is all that is kept of a layer that is recomputed. Where the seconds are medians of several measurements,
    ``forward_measured_s`` and ``backward_measured_s`` have them with their quartiles. Raises ValueError for a number
    that is negative or infinite.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int
    activation_bytes: int
    input_bytes: int
    forward_measured_s: Spread | None = None
    backward_measured_s: Spread | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not name.endswith("_measured_s") and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of 0 or more (got {value!r}); measure the layer again")

    @cached_property
    def spread_s(self) -> tuple[float, float]:
        """Seconds between the quartiles of the forward and of the backward pass, 0 where they were not measured."""
        forward_s, backward_s = (
            0.0 if measured_s is None else measured_s.high - measured_s.low
            for measured_s in (self.forward_measured_s, self.backward_measured_s)
        )
        return forward_s, backward_s


def spread_of(layers: Sequence[LayerCost]) -> float:
    """Returns the part of all layers' time that lies between the quartiles of what was measured, 0 of none."""
    if not any(any(layer.spread_s) for layer in layers):
        return 0.0
    total_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    return sum(sum(layer.spread_s) for layer in layers) / total_s if total_s else 0.0


def recomputed_layers(ratio: float, layers: int) -> int:
    """Returns how many layers of a stage are recomputed by ``ratio``, rounded down as vPipe does."""
    return int(ratio * layers)


def ratio_of(recomputed: int, layers: int) -> float:
    """Returns the ratio by which so many layers of a stage are recomputed: what recomputed_layers turns back."""
    ratio = recomputed / layers
    return ratio if recomputed_layers(ratio, layers) == recomputed else math.nextafter(ratio, 1)  # 15 / 22 · 22 < 15


class StageCosts:
    """The costs of a row of layers as stages.

    ``held`` is, for each stage, how many micro-batches' activations it holds at the most. ``ratios`` are the stages'
    recompute ratios, None to have each recompute as few layers as its memory asks for. ``buffered`` is the number of
    micro-batches whose inputs and output gradients have a receive buffer throughout. ``offloaded`` says what passes
    through a window instead of being on the device throughout, beside ``micro_batches`` in a step.
    """

    def __init__(
        self,
        layers: Sequence[LayerCost],
        held: Sequence[int],
        ratios: Sequence[float] | None,
        *,
        micro_batches: int,
        buffered: int = 0,
        offloaded: OffloadedStages | None = None,
    ) -> None:
        self.layers = layers
        self.held = np.array(held, np.int64)
        self.ratios = None if ratios is None else np.array(ratios, np.float64)
        self.micro_batches = micro_batches
        self.offloaded = offloaded
        # Sums over the first n layers: a run's own is the difference of two.
        self.forward_s = _sums([layer.forward_s for layer in layers], np.float64)
        self.backward_s = _sums([layer.backward_s for layer in layers], np.float64)
        self.weight_bytes = _sums([layer.weight_bytes for layer in layers], np.int64)
        self.kept_bytes = _sums([layer.activation_bytes for layer in layers], np.int64)
        self.input_bytes = _sums([layer.input_bytes for layer in layers], np.int64)
        self.activation_bytes = np.array([layer.activation_bytes for layer in layers], np.int64)
        self.largest_activations = Largest([layer.activation_bytes for layer in layers])
        # What is received behind the first n layers; nothing before the first layer and behind the last.
        received = [0, *(buffered * layer.input_bytes for layer in layers[1:]), 0]
        self.received_bytes = np.array(received, np.int64)

    def least_sums(self) -> list[tuple[Seconds, float]]:
        """Returns sums over the first n layers, with seconds that a stage's own sum of each may exceed its time by."""
        is_run_again = self.ratios is not None and min(self.ratios) == 1
        backward_s = self.backward_s + is_run_again * self.forward_s
        if self.offloaded is None:
            return [(self.forward_s + backward_s, 0.0)]
        return self.offloaded.least_sums(self.forward_s, backward_s, self.micro_batches)

    def runs(self, stage: Layers, firsts: Layers, ends: Layers) -> StageRuns:
        """Returns what ``stage`` could be, or each of many, if it had the layers from ``firsts`` to before ``ends``."""
        return StageRuns(self, stage, firsts, ends)


class StageRuns:
    """Stages of many runs of layers: arrays of the shape that ``stage``, ``firsts`` and ``ends`` have together.

    To recompute its last k layers saves a stage, against keeping everything, held · Σ (activations - input) of those
    layers less the largest activations among them, for one at a time has them while it is recomputed. Where each run is
    to recompute as few as fit, all have the same end: what is saved depends on the end and k alone, so that it is
    summed once for all of them, and the fewest layers are found by bisection.
    """

    def __init__(self, costs: StageCosts, stage: Layers, firsts: Layers, ends: Layers) -> None:
        self._costs = costs
        self._held = costs.held[stage]
        self._ratio = None if costs.ratios is None else costs.ratios[stage]
        self.stage, self.ends = stage, ends
        self._firsts = firsts
        self._lengths = np.subtract(ends, firsts)

    def recomputed(self, limit_bytes: LimitBytes) -> Counts:
        """Returns the fewest layers to recompute that fit the memory, more than there are where no number does."""
        if self._ratio is not None:
            counts = self._by_ratio()
            return np.where(self.memory_bytes(counts) <= limit_bytes, counts, self._lengths + 1)
        if np.min(limit_bytes) == math.inf:
            return np.zeros_like(self._lengths)
        missing = self.memory_bytes(np.zeros_like(self._lengths)) - limit_bytes
        return np.minimum(np.searchsorted(self._most_saved_bytes, missing), self._lengths + 1)

    def times(self, recomputed: Counts) -> Times:
        """Returns the seconds of one micro-batch if the last layers run forward again in the backward pass."""
        costs = self._costs
        again_s = costs.forward_s[self.ends] - costs.forward_s[self.ends - recomputed]
        forward_s, backward_s = self._sum(costs.forward_s), self._sum(costs.backward_s) + again_s
        if costs.offloaded is None:
            return Times(forward_s, backward_s, forward_s + backward_s, np.zeros_like(self._lengths))
        return costs.offloaded.times(forward_s, backward_s, self._firsts, self.ends, costs.micro_batches)

    def time_s(self, limit_bytes: LimitBytes) -> Seconds:
        """Returns the seconds of one micro-batch, infinite where the stage does not fit the memory."""
        recomputed = self.recomputed(limit_bytes)
        fits = recomputed <= self._lengths
        times = self.times(np.where(fits, recomputed, 0))
        return np.where(fits, times.forward_s + times.backward_s, math.inf)

    def memory_bytes(self, recomputed: Counts) -> Counts:
        """Returns the stage's peak if its last ``recomputed`` layers are recomputed."""
        costs = self._costs
        if costs.offloaded is None:
            weights = self._sum(costs.weight_bytes)
        else:
            weights = costs.offloaded.held_bytes(self._firsts, self.ends)
        kept = self._held * self._sum(costs.kept_bytes)
        received = costs.received_bytes[self._firsts] + costs.received_bytes[self.ends]
        return weights + kept + received - self._saved_bytes(recomputed)

    def least_bytes(self) -> Counts:
        """Returns the stage's peak with whatever recomputation has the least."""
        if self._ratio is not None:
            return self.memory_bytes(self._by_ratio())
        return self.memory_bytes(np.zeros_like(self._lengths)) - self._most_saved_bytes[self._lengths]

    def _by_ratio(self) -> Counts:
        assert self._ratio is not None
        return (self._ratio * self._lengths).astype(np.int64)  # as recomputed_layers has it

    def _saved_bytes(self, recomputed: Counts) -> Counts:
        """What it saves to recompute the last layers."""
        if not np.any(recomputed):
            return np.zeros_like(self._lengths)
        costs, firsts = self._costs, self.ends - recomputed
        kept = costs.kept_bytes[self.ends] - costs.kept_bytes[firsts]
        inputs = costs.input_bytes[self.ends] - costs.input_bytes[firsts]
        largest = costs.largest_activations.within(np.minimum(firsts, np.subtract(self.ends, 1)), self.ends)
        return np.where(recomputed > 0, self._held * (kept - inputs) - largest, 0)

    @cached_property
    def _most_saved_bytes(self) -> Counts:
        """What it saves at the most to recompute k layers or fewer, of runs with one end."""
        assert isinstance(self.ends, int)
        costs, run, back = self._costs, slice(self.ends - int(np.max(self._lengths)), self.ends), slice(None, None, -1)
        kept, inputs = costs.kept_bytes, costs.input_bytes
        saved = self._held * (kept[self.ends] - kept[run] - (inputs[self.ends] - inputs[run]))[back]
        largest = np.maximum.accumulate(costs.activation_bytes[run][back])
        return np.maximum.accumulate(np.concatenate(([0], saved - largest)))

    def _sum(self, sums: NDArray[Any]) -> NDArray[Any]:
        return sums[self.ends] - sums[self._firsts]


def _sums(values: Sequence[float], dtype: type) -> NDArray[Any]:
    return np.array([0, *accumulate(values)], dtype)
