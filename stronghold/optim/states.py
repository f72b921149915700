"""The moments of AdamW, on the host: one buffer a unit, one view a parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stronghold.device import Device, HostBuffer
from stronghold.home import Home
from stronghold.layout import Layout, lay_out


def lay_out_moments(home: Home, places: Iterable[int]) -> Layout:
    """Returns how the two moments of each parameter at ``places`` lie in one buffer."""
    return lay_out([4 * home.parameters[place].numel() for place in places for _ in range(2)])


class Moments:
    """``exp_avg`` and ``exp_avg_sq`` in fp32 for the parameters that are trained: 8 bytes each.

    Memory that a unit's frozen parameters would need is not taken; a parameter that is unfrozen later gets its own.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[HostBuffer] = []
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._used: set[tuple[int, int]] = set()

    def allocate(self, home: Home, places: Iterable[int]) -> None:
        """Allocates moments, all zero, for the parameters at ``places`` of ``home`` that have none yet."""
        places = [place for place in places if (id(home), place) not in self._views]
        if not places:
            return
        layout = lay_out_moments(home, places)
        buffer = self._device.host_buffer(layout.total_bytes, pinned=False)
        self._buffers.append(buffer)
        for i, place in enumerate(places):
            shape = home.shapes[place]
            first, second = (buffer.view(layout.offsets[2 * i + j], shape, torch.float32) for j in range(2))
            self._views[id(home), place] = (first, second)

    def begin(self, home: Home, place: int) -> tuple[Tensor, Tensor]:
        """Returns the moments of a parameter without state: all zero, though it had one that was since dropped."""
        used = (id(home), place) in self._used
        moments = self.of(home, place)
        if used:
            for moment in moments:
                moment.zero_()
        return moments

    def of(self, home: Home, place: int) -> tuple[Tensor, Tensor]:
        """Returns (exp_avg, exp_avg_sq) of one parameter, in its shape."""
        self.allocate(home, [place])
        self._used.add((id(home), place))
        return self._views[id(home), place]
