"""Some elements of each weight of a unit, by which a write is found that nothing told the engine of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stronghold.layout import Layout

_PER_PARAMETER = 64
_PER_UNIT = 4096


class Samples:
    """Up to 64 elements of each parameter, its first and last among them, and their bits when they were last taken.

    An optimizer, a clamp or a mask that an extension of the user's writes through a bare pointer changes nearly all
    elements, and so some of these, in whatever order it goes. A write of single elements may miss them.
    """

    def __init__(self, flat: Tensor, layout: Layout, itemsizes: Sequence[int]) -> None:
        self._bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[min(itemsizes)]
        self._elements = flat.view(self._bits)
        most = max(2, min(_PER_PARAMETER, _PER_UNIT // max(1, len(itemsizes))))
        places, unit = [], min(itemsizes)
        for offset, size, itemsize in zip(layout.offsets, layout.sizes, itemsizes, strict=True):
            chosen = (offset + itemsize * _spread(size // itemsize, most)) // unit
            several = torch.arange(itemsize // unit, device="cpu")  # what a longer element has
            places.append((chosen[:, None] + several).flatten())
        self._counts = [len(one) for one in places]
        self._places = torch.cat(places)
        self._taken: Tensor | None = None

    def take(self) -> None:
        """Notes what the elements are now."""
        self._taken = self._now(self._elements)

    def written(self) -> Sequence[int]:
        """Returns the numbers of the parameters that have changed since the elements were taken."""
        return () if self._taken is None else self._differing(self._now(self._elements), self._taken)

    def differing(self, elsewhere: Tensor) -> Sequence[int]:
        """Returns the numbers of the parameters that are others in a flat copy of all the weights ``elsewhere``."""
        return self._differing(self._now(elsewhere.view(self._bits)), self._now(self._elements))

    def _differing(self, now: Tensor, then: Tensor) -> Sequence[int]:
        if torch.equal(now, then):
            return ()
        changed = (now != then).split(self._counts)
        return [place for place, one in enumerate(changed) if bool(one.any())]

    def _now(self, elements: Tensor) -> Tensor:
        return elements.index_select(0, self._places.to(elements.device)).cpu()


def _spread(size: int, most: int) -> Tensor:
    if size <= most:
        return torch.arange(size, device="cpu")
    return torch.linspace(0, size - 1, most, dtype=torch.float64, device="cpu").long()
