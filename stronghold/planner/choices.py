"""What a search may choose of a step's settings, and one such choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Choice(NamedTuple):
    """One setting of everything that is searched over; names and values are those of ``offload`` and ``AdamW``.

    ``resident`` and ``kept`` are numbers of layers: which ones stay on the device and which keep their activations
    follows from how many.
    """

    window: int
    resident: int = 0
    kept: int = 0
    micro_batch: int | None = None
    update: str = "deferred"
    states: str = "fp32"
    store: str = "ram"


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen: everything that the user has left open, and of what the user has set that alone."""

    layers: int
    residents: Sequence[int] = (0,)
    kepts: Sequence[int] = (0,)
    windows: Sequence[int] | None = None
    """Ascending, as ``residents`` and ``kepts``; None for any."""
    micro_batches: Sequence[int | None] = (None,)
    updates: Sequence[str] = ("deferred", "in_backward")
    states: Sequence[str] = ("fp32",)
    stores: Sequence[str] = ("ram",)

    def windows_beside(self, resident: int) -> list[int]:
        """Returns the windows, ascending, that there are beside so many resident layers; 1 where no layer is left."""
        most = max(1, self.layers - resident)
        return [window for window in self.windows or range(1, most + 1) if window <= most]
