"""What any run of layers takes as any stage: seconds and bytes, with as much recomputation as its memory asks for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer takes: seconds and bytes of one micro-batch, and the bytes that it takes whatever passes through.

    ``weight_bytes`` is everything that does not depend on the micro-batches: what of weights, gradients and states is
    in the memory that is to be planned. ``activation_bytes`` is what is kept of a micro-batch between its forward and
    its backward pass, ``input_bytes`` what enters the layer: it comes over the link where the layer is a stage's first,
    and is all that is kept of a layer that is recomputed. Raises ValueError for a number that is negative or infinite.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int
    activation_bytes: int
    input_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of 0 or more (got {value!r}); measure the layer again")


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
    micro-batches whose inputs and output gradients have a receive buffer throughout.
    """

    def __init__(
        self, layers: Sequence[LayerCost], held: Sequence[int], ratios: Sequence[float] | None, buffered: int
    ) -> None:
        self.layers = layers
        self.held = held
        self.ratios = ratios
        # Sums over the first n layers: a run's own is the difference of two.
        self.forward_s = [0.0, *accumulate(layer.forward_s for layer in layers)]
        self.backward_s = [0.0, *accumulate(layer.backward_s for layer in layers)]
        self.weight_bytes = [0, *accumulate(layer.weight_bytes for layer in layers)]
        self.activation_bytes = [0, *accumulate(layer.activation_bytes for layer in layers)]
        # What is received behind the first n layers; nothing before the first layer and behind the last.
        self.received_bytes = [0, *(buffered * layer.input_bytes for layer in layers[1:]), 0]

    def ending(self, stage: int, end: int) -> StageEnding:
        """Returns what ``stage`` could be if its last layer were ``end`` - 1."""
        return StageEnding(self, stage, end)


class StageEnding:
    """One stage that ends before layer ``end``, wherever it begins.

    To recompute its last k layers saves it, against keeping everything, held · Σ (activations - input) of those layers
    less the largest activations among them, for one at a time has them while it is recomputed. That depends on ``end``
    and k alone, so it is summed once for all beginnings, and the fewest layers are found by bisection.
    """

    def __init__(self, costs: StageCosts, stage: int, end: int) -> None:
        self._costs = costs
        self._held = costs.held[stage]
        self._ratio = None if costs.ratios is None else costs.ratios[stage]
        self._end = end
        self._saved_bytes = [0]
        saved, largest = 0, 0
        for layer in reversed(costs.layers[:end]):
            saved += self._held * (layer.activation_bytes - layer.input_bytes)
            largest = max(largest, layer.activation_bytes)
            self._saved_bytes.append(saved - largest)
        self._most_saved_bytes = list(accumulate(self._saved_bytes, max))

    def recomputed(self, first: int, limit_bytes: float) -> int | None:
        """Returns the fewest layers to recompute that fit the memory, None where no number does."""
        layers = self._end - first
        if self._ratio is not None:
            count = recomputed_layers(self._ratio, layers)
            return count if self.memory_bytes(first, count) <= limit_bytes else None
        count = bisect_left(self._most_saved_bytes, self.memory_bytes(first, 0) - limit_bytes, hi=layers + 1)
        return count if count <= layers else None

    def forward_s(self, first: int) -> float:
        """Returns the seconds of the forward pass of one micro-batch."""
        return self._costs.forward_s[self._end] - self._costs.forward_s[first]

    def backward_s(self, first: int, recomputed: int) -> float:
        """Returns the seconds of the backward pass of one micro-batch, in which the last layers run forward again."""
        again_s = self.forward_s(self._end - recomputed)
        return self._costs.backward_s[self._end] - self._costs.backward_s[first] + again_s

    def memory_bytes(self, first: int, recomputed: int) -> int:
        """Returns the stage's peak if its last ``recomputed`` layers are recomputed."""
        costs, end = self._costs, self._end
        return (
            costs.weight_bytes[end]
            - costs.weight_bytes[first]
            + self._held * (costs.activation_bytes[end] - costs.activation_bytes[first])
            + costs.received_bytes[first]
            + costs.received_bytes[end]
            - self._saved_bytes[recomputed]
        )

    def least_bytes(self, first: int) -> int:
        """Returns the stage's peak with whatever recomputation has the least."""
        layers = self._end - first
        if self._ratio is not None:
            return self.memory_bytes(first, recomputed_layers(self._ratio, layers))
        return self.memory_bytes(first, 0) - self._most_saved_bytes[layers]
