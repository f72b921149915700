"""The RAM store: every layer lies in host memory, from where it is copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stronghold.device import Buffer, over
from stronghold.layout import Part
from stronghold.store.store import Kernel, Piece, Store, UpdateIO
from stronghold.unit import Kind, Unit


class RamStore(Store):
    """Keeps weights, remainders and moments in host memory, pinned where the device's copies gain from it."""

    def allocate(self, unit: Unit, length_bytes: int, kind: Kind) -> Buffer:
        if unit.resident:
            return self.device.device_buffer(length_bytes)
        memory = unit.replicas.memory(length_bytes)
        # Of weights copies are taken, and a child of fork may look at them; the rest the host's kernels alone work on.
        looked_at = kind == "weights"
        return self.device.host_buffer(length_bytes, pinned=looked_at, private=not looked_at, memory=memory)

    def fetch(self, unit: Unit, target: Tensor) -> None:
        assert unit.buffer is not None
        self.device.fetches.copy(target[: unit.buffer.length_bytes], unit.buffer.flat)

    def give_back(self, units: Sequence[Unit]) -> None:
        pass

    def expect(self, units: Sequence[Unit]) -> None:
        pass

    def changed(self, unit: Unit) -> None:
        pass

    def mark_dirty(self, unit: Unit) -> None:
        pass

    def written(self, unit: Unit) -> tuple[list[int], bool]:
        return [], False  # memory keeps no trace of it

    def drop(self, unit: Unit) -> None:
        pass

    def verify(self) -> None:
        pass

    def close(self) -> None:
        pass

    def update_io(self, unit: Unit, operands: Sequence[Sequence[Tensor]], parts: Sequence[Part]) -> UpdateIO:
        return InPlace(parts)


class InPlace:
    """Of what lies in memory nothing is read or written back."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def begin(self) -> None:
        pass

    def run(self, segments: Sequence[Piece], kernel: Kernel) -> None:
        own = [_cut(segments[part.number], part) for part in self.parts]
        if own := [segment for segment in own if segment is not None]:
            kernel(own)

    def cancel(self) -> None:
        pass


def _cut(segment: Piece, part: Part) -> Piece | None:
    """Returns what of a segment is updated here, None where others update all of it."""
    if part.end - part.begin == segment.elements:
        return segment
    if part.begin == part.end:
        return None
    cut: Piece = segment.mapped(over).part(part.begin, part.end)
    return cut
