"""What a layer has computed with, where the user may write it unseen before the backward pass asks for it again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_WORDS_AT_ONCE = 1 << 16
_ODD = torch.arange(1, 2 * _WORDS_AT_ONCE, 2, dtype=torch.int64, device="cpu") * 0x9E3779B97F4A7C1


class ComputedWith:
    """Digests of weights, taken before the user may write them by a way that no version tells of."""

    def __init__(self) -> None:
        self.runs: weakref.WeakSet[Any] = weakref.WeakSet()
        """What the layer has computed and a backward pass may come back to."""
        self._digests: dict[int, Tensor] = {}

    @property
    def digests(self) -> Mapping[int, Tensor]:
        """Those of the weights that the user may write unseen, by index; what was returned is kept when they end."""
        return self._digests

    def note(self, index: int, weight: Tensor) -> bool:
        """Called before the user may write ``weight`` unseen; returns whether it has read it."""
        if index in self._digests:
            return False
        self._digests[index] = digest(weight)
        return True

    def others(self, weights: list[Tensor]) -> bool:
        """Whether ``weights`` are others than those that the runs have computed with."""
        if not self.runs:
            self.forget()
        digests = [*self._digests.items()]  # another thread may look at a weight meanwhile
        return any(not torch.equal(digest(weights[index]), known) for index, known in digests)

    def forget(self) -> None:
        """Called when the weights have become others, which the runs are told of otherwise."""
        self._digests = {}


def digest(weight: Tensor) -> Tensor:
    """Returns a sum, weighted by odd numbers, of the bits of ``weight`` as 64-bit words, for every 512 KiB of them.

    One changed word always shows; several do, but for a chance of 2 ** -64. ``weight`` is read once, in pieces, and
    what is returned lies on its device, int64 of shape ``(pieces,)``.
    """
    octets = weight.detach().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    odd = _ODD.to(octets.device)
    sums = [(part * odd[: len(part)]).sum() for part in octets[:whole].view(torch.int64).split(_WORDS_AT_ONCE)]
    if whole < octets.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=octets.device)
        rest[: octets.numel() - whole] = octets[whole:]
        sums.append(rest.view(torch.int64)[0])
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device="cpu")
