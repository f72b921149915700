"""Gradients on their way down: from the device's gradient slots into the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stronghold.device import Device, Event, HostBuffer
from stronghold.errors import OffloadedModelError
from stronghold.home import ConsumedGradient, Home, Updater, consumed_error, consumed_like
from stronghold.window.traffic import Traffic
from stronghold.window.waits import Wait, Waits

RING = 2
"""Gradient slots on the device, and staging buffers on the host: one fills while the other drains."""


@dataclass
class _DeviceSlot:
    flat: Tensor
    drained: Event | None = None


@dataclass
class _Staging:
    buffer: HostBuffer
    free: Event | None = None


class Gradients:
    """Takes each gradient from autograd as it appears and brings it to the host, layer by layer.

    While a backward pass goes on, the gradients of its layers belong to this class and ``.grad`` is None; when it has
    ended they are published, as ordinary CPU tensors in ``.grad``. A gradient that was there before is added to, on
    the host, in the gradients' dtype, as autograd would.
    """

    def __init__(self, homes: Sequence[Home], device: Device, waits: Waits) -> None:
        self.homes = homes
        self.device = device
        self.waits = waits
        self.traffic = Traffic()
        self.updater: Updater | None = None
        longest = max((home.layout.total_bytes for home in homes if home.trainable), default=0)
        self._slots = [_DeviceSlot(device.buffer(longest)) for _ in range(RING)] if longest else []
        self._staging = [_Staging(device.host_buffer(longest)) for _ in range(RING)] if longest else []
        self._layer: int | None = None
        self._written: set[int] = set()
        self._held: dict[int, dict[int, Tensor]] = {}
        self._down: Event | None = None
        self._added: Event | None = None
        self._consumed: set[int] = set()

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.numel() for slot in self._slots)

    def open(self, layer: int) -> None:
        """Begins the backward pass of ``layer``: its ``.grad`` become the class's own."""
        home = self.homes[layer]
        self._layer, self._written = layer, set()
        held = self._held.setdefault(layer, {})
        with torch._C.DisableTorchFunctionSubclass():
            for place, parameter in enumerate(home.parameters):
                if isinstance(parameter.grad, ConsumedGradient):
                    raise consumed_error()
                if parameter.grad is not None:
                    held[place] = parameter.grad
                    parameter.grad = None

    def take(self, parameter: nn.Parameter) -> None:
        """Takes the gradient that autograd has just put into ``parameter.grad`` of the layer that is open."""
        assert self._layer is not None
        home = self.homes[self._layer]
        place = parameter.__dict__["_place"]
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.requires_grad:
            raise OffloadedModelError(
                "backward(create_graph=True) needs gradients that stay on the device with their graph, and an "
                f"offloaded layer's ({home.name}) go to the host; offload without the layers that need second "
                "derivatives (layers=...)"
            )
        if gradient.layout != torch.strided:
            raise OffloadedModelError(
                f"{home.name} produced a gradient of layout {gradient.layout}, and only dense gradients travel; "
                "pass sparse=False to its embedding"
            )
        view = self._view(self._slot.flat, home, place)
        if not self._written:
            # The copy down of the layer that used this slot before must have read it.
            self.waits.compute(self._slot.drained, Wait.GRADIENT_SLOT_FREE)
        self.device.compute_copy(view, gradient, add=place in self._written)
        self._written.add(place)

    def close(self) -> Event | None:
        """Ends the layer's backward pass and sends its gradients down.

        Under ``in_backward`` the update follows at once; returns its event.
        """
        layer, self._layer = self._layer, None
        if layer is None or not self._written:
            return None
        home, slot, places = self.homes[layer], self._slot, sorted(self._written)
        self._slots.append(self._slots.pop(0))
        down = self.device.gradients
        # The computation may lag behind the host, so that the slot is not filled yet when this is issued.
        self.waits.stream(down, self.device.compute_mark(), Wait.GRADIENT_WRITTEN)
        if self.updater is not None and self.updater.in_backward:
            return self._down_and_update(home, slot, places)
        held = self._held[layer]
        home.place_gradients(self.device)
        fresh = [place for place in places if place not in held]
        assert home.gradient_buffer is not None
        self._copy_down(home, slot, fresh, home.gradient_buffer)
        held.update((place, home.gradient[place].detach()) for place in fresh)
        again = [place for place in places if place not in fresh]
        if again:
            self._add(home, slot, again, held)
        else:
            self._down = slot.drained = down.record()
        return None

    def publish(self) -> None:
        """Ends the backward pass: waits for all gradients and makes them the parameters' ``.grad``."""
        # The user, a clipping function or an optimizer reads them next.
        self.waits.host(self._down, Wait.GRADIENT_READ)
        self.waits.host(self._added, Wait.GRADIENT_ADDED)
        self._down = self._added = None
        with torch._C.DisableTorchFunctionSubclass():
            for layer, held in self._held.items():
                for place, gradient in held.items():
                    self.homes[layer].parameters[place].grad = gradient
            for layer in self._consumed:
                for parameter in self.homes[layer].parameters:
                    if parameter.requires_grad:
                        parameter.grad = consumed_like(parameter)
        self._held.clear()
        self._consumed.clear()

    @property
    def layer(self) -> int | None:
        """The layer whose backward pass is open."""
        return self._layer

    @property
    def _slot(self) -> _DeviceSlot:
        return self._slots[0]

    def _view(self, flat: Tensor, home: Home, place: int) -> Tensor:
        begin, size = home.layout.offsets[place], home.layout.sizes[place]
        return flat[begin : begin + size].view(home.dtype).view(home.shapes[place])

    def _copy_down(self, home: Home, slot: _DeviceSlot, places: Sequence[int], buffer: HostBuffer) -> None:
        for begin, length in home.layout.runs(places):
            self.device.gradients.copy(buffer.flat[begin : begin + length], slot.flat[begin : begin + length])
            self.traffic.gradient_bytes += length

    def _stage(self, home: Home, slot: _DeviceSlot, places: Sequence[int]) -> tuple[_Staging, dict[int, Tensor]]:
        """Sends gradients down into a staging buffer; returns it and the views there."""
        staging = self._staging[0]
        self._staging.append(self._staging.pop(0))
        # What was staged here before must have been added, or used for its update.
        self.waits.stream(self.device.gradients, staging.free, Wait.STAGING_FREE)
        self._copy_down(home, slot, places, staging.buffer)
        slot.drained = self.device.gradients.record()
        layout = home.layout
        return staging, {p: staging.buffer.view(layout.offsets[p], home.shapes[p], home.dtype) for p in places}

    def _add(self, home: Home, slot: _DeviceSlot, places: Sequence[int], held: dict[int, Tensor]) -> None:
        staging, views = self._stage(home, slot, places)
        updates = self.device.updates
        # The copy into the staging buffer must be complete before the host adds from it.
        self.waits.stream(updates, slot.drained, Wait.GRADIENT_ADD)

        def add() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                for place, view in views.items():
                    held[place].add_(view)

        updates.run(add, moved_bytes=3 * sum(home.layout.sizes[p] for p in places))
        self._added = staging.free = updates.record()

    def _down_and_update(self, home: Home, slot: _DeviceSlot, places: Sequence[int]) -> Event:
        assert home.index is not None and self.updater is not None
        if home.index in self._consumed:
            raise OffloadedModelError(
                f"{home.name} received gradients twice in one backward pass, and update='in_backward' had already "
                "used the first; use update='deferred'"
            )
        staging, views = self._stage(home, slot, places)
        self._consumed.add(home.index)
        assert slot.drained is not None
        staging.free = self.updater.update_now(home, views, slot.drained)
        return staging.free
