"""The RAM store: every layer lies in host memory, from where it is copied."""

from __future__ import annotations

from torch import Tensor

from stronghold.device import Device
from stronghold.home import Home


class RamStore:
    """Keeps weights, masters and gradients in host memory, pinned where the device's copies gain from it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def place(self, home: Home) -> None:
        """Moves the parameters of ``home`` into the store."""
        home.place(self.device)

    def fetch(self, home: Home, target: Tensor) -> None:
        """Submits the copy of the unit's weights to the flat device buffer ``target``, on the fetch stream."""
        assert home.buffer is not None
        self.device.fetches.copy(target[: home.buffer.length_bytes], home.buffer.flat)
