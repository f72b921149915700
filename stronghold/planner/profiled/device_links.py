"""What it takes to send a tensor to the next stage, and to change its layout within one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stronghold.planner.profiled.layouts import SPLIT, Reshard

MIB = 2**20
GB = 1000 * MIB
"""What a profile calls a GB, in bytes: its MB are MiB."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """A profile's links.

    ``within`` and ``between`` have the bytes/s between two devices of one node and of two, by size: the first is for
    messages below 4 MiB, and each further one for twice that size, as Aceso reads the table. ``collectives`` are
    seconds by kind, devices and size in whole MiB.
    """

    within: Sequence[float]
    between: Sequence[float]
    collectives: Mapping[str, Mapping[int, Mapping[int, float]]] = field(default_factory=dict)

    def send_s(self, size_bytes: float, *, across: bool) -> float:
        """Returns the seconds that a message takes, ``across`` nodes or within one."""
        if size_bytes <= 0:
            return 0.0
        bands = self.between if across else self.within
        step = max(math.floor(math.log2(size_bytes / MIB)) - 1, 0)
        return size_bytes / bands[min(step, len(bands) - 1)]

    def reshard_s(self, change: Reshard, size_bytes: float) -> tuple[float, float] | None:
        """Returns the seconds of the collectives of ``change``, forward and backward; None where one is not profiled.

        A size is that of the table's line for as many whole MiB, rounded, or for one less.
        """
        size = int(f"{size_bytes / MIB:.0f}")
        found = []
        for kind in (change.forward, change.backward):
            times = self.collectives.get(kind, {}).get(change.devices, {})
            seconds = 0.0 if kind == SPLIT else times.get(size, times.get(int(f"{size_bytes / MIB - 1:.0f}")))
            if seconds is None:
                return None
            found.append(seconds)
        return found[0], found[1]
