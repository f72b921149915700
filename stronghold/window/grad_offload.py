"""The way down for gradients: slots that they are collected in on the device, and staging on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stronghold import native
from stronghold.device import Device, Event, HostBuffer, Wait, Waits
from stronghold.layout import Layout
from stronghold.unit import HostGrad, Unit
from stronghold.window.sums import write_squares
from stronghold.window.traffic import Traffic

RING = 2
"""Gradient slots on the device, and staging buffers on the host: one fills while the other drains."""


class Views:
    """What was made of a buffer for the layers whose gradients pass through it, kept for the next pass."""

    def __init__(self) -> None:
        self._known: dict[Unit, tuple[Layout, dict[int, HostGrad]]] = {}

    def of(self, unit: Unit, view: Callable[[int], HostGrad]) -> dict[int, HostGrad]:
        """Returns, by index, the gradients of a layer with their squares, made by ``view`` where they are not known."""
        layout, known = self._known.get(unit, (None, {}))
        if layout is not unit.gradients.layout:  # a parameter is trained now that was not
            known = {index: view(index) for index in unit.gradients.indices}
            self._known[unit] = unit.gradients.layout, known
        return known


@dataclass
class DeviceSlot:
    """A fixed device buffer that holds the gradients of one layer, and their squares."""

    flat: Tensor
    drained: Event | None = None
    views: Views = field(default_factory=Views)


@dataclass
class GradStaging:
    """A fixed host buffer for gradients that are added to others, or used for an update, and then gone."""

    buffer: HostBuffer
    free: Event | None = None
    views: Views = field(default_factory=Views)


class GradOffload:
    """The slots and staging buffers, each as long as the longest layer's gradients, and the copies between them."""

    def __init__(self, units: Sequence[Unit], device: Device, waits: Waits) -> None:
        self.units = [unit for unit in units if not unit.resident]
        self.device = device
        self.waits = waits
        self.traffic = Traffic()
        self.slots: deque[DeviceSlot] = deque()
        self._staging: deque[GradStaging] = deque()
        self._outgrown: list[object] = []
        self.fit()

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.numel() for slot in self.slots)

    @property
    def slot(self) -> DeviceSlot:
        """The slot that is filled now."""
        return self.slots[0]

    def fit(self) -> None:
        """Allocates slots and staging; again only after an unfreezing."""
        longest = max((self.slot_bytes(unit) for unit in self.units), default=0)
        if longest > (self.slot.flat.numel() if self.slots else 0):
            self._outgrown += [*self.slots, *self._staging]  # copies may still be under way in them
            self.slots = deque(DeviceSlot(self.device.buffer(longest)) for _ in range(RING))
            staged = max(unit.gradients.layout.total_bytes for unit in self.units)
            self._staging = deque(GradStaging(self.device.host_buffer(staged, private=True)) for _ in range(RING))

    def drop_resident(self) -> None:
        """Takes out layers that have become resident; nothing is under way in the buffers."""
        self.units = [unit for unit in self.units if not unit.resident]
        self.slots, self._staging, self._outgrown = deque(), deque(), []
        self.fit()

    def give_back(self) -> None:
        """Gives slots and staging back, if no layer is trained any more; nothing is under way in them."""
        if not any(unit.gradients.indices for unit in self.units):
            self.slots, self._staging, self._outgrown = deque(), deque(), []

    def slot_bytes(self, unit: Unit) -> int:
        """Returns what the gradients of a layer take in a slot."""
        return unit.gradients.layout.total_bytes

    def put(self, unit: Unit, index: int, gradient: Tensor, *, add: bool) -> None:
        """Copies a gradient into the slot that is filled now, in the order of the computation, or adds it there."""
        self.device.compute_copy(self._slot_views(unit)[index].values, gradient, add=add)

    def send(self, unit: Unit, indices: Sequence[int], threads: int, found_inf: Tensor | None) -> DeviceSlot:
        """Ends the filling of a slot and returns it: copies down may follow. The next one is filled from now on."""
        slot, views = self.slot, self._slot_views(unit)
        gradients, squares = [views[index].values for index in indices], [views[index].squares for index in indices]

        def sum_up() -> None:
            write_squares(gradients, squares, threads, found_inf)

        self.device.compute_run(lambda: native.in_team(sum_up))
        self._turn()
        return slot

    def _slot_views(self, unit: Unit) -> dict[int, HostGrad]:
        flat = self.slot.flat
        return self.slot.views.of(unit, lambda p: HostGrad(_gradient(flat, unit, p), _squares(flat, unit, p)))

    def _turn(self) -> None:
        self.slots.rotate(-1)  # in one go: where Ctrl-C came between a slot's way out and in, there would be one less
        # The computation may lag behind the host, so that the slot is not filled yet when this is issued.
        self.waits.stream(self.device.gradients, self.device.record_event(), Wait.GRADIENT_WRITTEN)

    def copy(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int], buffer: HostBuffer) -> None:
        """Submits the copy of the gradients at ``indices``, and of their squares, to a buffer of the same layout."""
        numbers = [unit.gradients.indices.index(index) for index in indices]
        numbers += [len(unit.gradients.indices) + number for number in numbers]  # the squares, behind all gradients
        with self.device.noted(self.device.gradients, f"gradients {unit.name}"):
            for begin, length in unit.gradients.layout.runs(numbers):
                self._copy(buffer.flat[begin : begin + length], slot.flat[begin : begin + length])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self.device.gradients.copy(target, source)
        self.traffic.gradient_bytes += source.nbytes

    def stage(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int]) -> tuple[GradStaging, dict[int, HostGrad]]:
        """Sends gradients down into a staging buffer; returns it and what arrives there."""
        staging = self._staging[0]
        self._staging.rotate(-1)
        # What was staged here before must have been added, or used for its update.
        self.waits.stream(self.device.gradients, staging.free, Wait.STAGING_FREE)
        self.copy(unit, slot, indices, staging.buffer)
        slot.drained = self.device.gradients.record()
        buffer, memory = staging.buffer, unit.gradients
        known = staging.views.of(unit, lambda p: HostGrad(memory.view(buffer, p), memory.squares(buffer, p)))
        return staging, {index: known[index] for index in indices}


def _gradient(flat: Tensor, unit: Unit, index: int) -> Tensor:
    """Returns the gradient of one parameter in a slot."""
    layout, number = unit.gradients.layout, unit.gradients.indices.index(index)
    begin, size = layout.offsets[number], layout.sizes[number]
    return flat[begin : begin + size].view(unit.dtypes[index]).view(unit.shapes[index])


def _squares(flat: Tensor, unit: Unit, index: int) -> Tensor:
    """Returns the sum of squares of one parameter's gradient in a slot."""
    begin = unit.gradients.squares_offset(index)
    return flat[begin : begin + 8].view(torch.float64).view(())
