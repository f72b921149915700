"""The RAM store: every layer lies in host memory, from where it is copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stronghold.device import Buffer
from stronghold.home import Home, Kind
from stronghold.native import Segment
from stronghold.store.base import Kernel, Passage, Store


class RamStore(Store):
    """Keeps weights, remainders and moments in host memory, pinned where the device's copies gain from it."""

    def allocate(self, home: Home, length_bytes: int, kind: Kind) -> Buffer:
        if home.resident:
            return self.device.device_buffer(length_bytes)
        return self.device.host_buffer(length_bytes, pinned=kind == "weights")

    def fetch(self, home: Home, target: Tensor) -> None:
        assert home.buffer is not None
        self.device.fetches.copy(target[: home.buffer.length_bytes], home.buffer.flat)

    def expect(self, homes: Sequence[Home]) -> None:
        pass

    def changed(self, home: Home) -> None:
        pass

    def opened(self, home: Home) -> None:
        pass

    def drop(self, home: Home) -> None:
        pass

    def verify(self) -> None:
        pass

    def close(self) -> None:
        pass

    def passage(self, home: Home, operands: Sequence[Sequence[Tensor]]) -> Passage:
        return InPlace()


class InPlace:
    """The passage of what lies in memory: there is none."""

    def run(self, segments: list[Segment], kernel: Kernel) -> None:
        kernel(segments)

    def cancel(self) -> None:
        pass
