"""One number for a weight, by which it shows whether it was written in between."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS_AT_ONCE = 1 << 16
_ODD = torch.arange(1, 2 * _WORDS_AT_ONCE, 2, dtype=torch.int64) * 0x9E3779B97F4A7C1


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
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)
