"""When the most of a step's activations, and of gradients, is alive on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation


@dataclass(frozen=True)
class Alive:
    """The most bytes of activations that are alive at once, root parameters' gradients of this pass with them.

    That is over the whole forward pass, up to the first backward pass of a layer, and for each layer from the beginning
    of its backward pass to the next one's.
    """

    forward_bytes: int
    backward_bytes: NDArray[np.int64]

    def most(self, gradients: Iterable[tuple[int, int]], *, stay: bool, batches: int) -> int:
        """Returns the most, with ``gradients`` of resident layers, as (layer, bytes), from when each has its own.

        They ``stay`` for the rest of the pass, or are given up at the end of the layer's. Activations are those of so
        many ``batches``.
        """
        beside = np.zeros_like(self.backward_bytes)
        for number, taken_bytes in gradients:
            beside[number] = taken_bytes
        if stay:
            beside = np.cumsum(beside[::-1])[::-1]
        # A layer without a backward pass has no gradient either, and what is alive then is no more than before.
        in_backward = (batches * self.backward_bytes + beside).max(initial=0)
        return max(batches * self.forward_bytes, int(in_backward))


def alive(of: ModelComputation, micro_batch: int | None, kept: int) -> Alive:
    """Returns what is alive in a pass.

    The last ``kept`` layers keep their activations, and the others are recomputed, over micro-batches of so many
    samples.
    """
    root, count = of.root, len(of.group_of)
    passes = [of.passes(n, micro_batch, kept=n >= count - kept) for n in range(count)]
    left = [one.saved_bytes if n in root.dropped else one.left_bytes for n, one in enumerate(passes)]
    most = held = 0  # what layers before have left
    for number, own in enumerate(passes):
        if number in of.idle:
            continue
        most = max(most, held + max(root.before_bytes[number], root.given_bytes[number] + own.forward_bytes))
        held += left[number]
    most = max(most, held + root.behind_bytes)
    backward = np.zeros(count, np.int64)
    for number, own in reversed([*enumerate(passes)]):
        held -= left[number]
        if number in root.live_bytes:
            within = root.live_bytes[number] + own.saved_bytes + own.backward_bytes
            backward[number] = held + max(within, root.after_bytes[number])
    return Alive(most, backward)
