"""How many samples each replica has had in a backward pass: that all had as many is noticed as they meet anyway."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from stronghold.unit import Replicas, Unit, gradient_name


class Batches:
    """Warns, once and in the first replica, where replicas have batches of different sizes.

    It is no error, for whether the mean is then the wrong one depends on what the user's loss divides by.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._most = 0
        self._warned = replicas.rank != 0

    def saw(self, size: int) -> None:
        """Called when a layer's backward pass begins; its input had ``size`` samples."""
        self._most = max(self._most, size)

    def agree(self, done: Sequence[tuple[int, tuple[int, ...]]], units: Sequence[Unit]) -> None:
        """Meets the other replicas at the end of a backward pass; raises ParallelError unless they have ``done`` it.

        That are layers, by number, in the order in which their gradients were made, with the indices of these.
        """

        def named() -> dict[str, int]:
            each = ((units[layer], index) for layer, indices in done for index in indices)
            return {gradient_name(*one): number for number, one in enumerate(each)}

        size, self._most = self._most, 0
        least, most = self._replicas.agree(done, named=named, batch=size)
        if least == most or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"replicas should have batches of the same size (got {least} to {most} samples in one backward pass, by "
            "the first dimension of a layer's input): all replicas' gradients weigh the same in the mean, as under "
            "DistributedDataParallel, so that a sample of a smaller batch counts for more than in one process with all "
            "the data. Pass drop_last=True to the DataLoader and its sampler, or weigh each replica's loss",
            RuntimeWarning,
            stacklevel=2,
        )
