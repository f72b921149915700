"""Gradients on their way down: from the device's gradient slots into the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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
        self._slots: list[_DeviceSlot] = []
        self._staging: list[_Staging] = []
        self._outgrown: list[object] = []
        self._fit()
        self._layer: int | None = None
        self._written: set[int] = set()
        self._held: dict[int, dict[int, Tensor]] = {}
        self._down: Event | None = None
        self._added: Event | None = None
        self._consumed: set[tuple[int, int]] = set()
        self._lent: dict[tuple[int, int], StorageWeakRef] = {}
        """The tensors over the homes' gradient buffers that the user got."""

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.numel() for slot in self._slots)

    def open(self, layer: int) -> None:
        """Begins the backward pass of ``layer``: its ``.grad`` become the class's own."""
        home = self.homes[layer]
        if home.fit_gradients():  # a frozen parameter is trained now
            self._fit()
        self._layer, self._written = layer, set()
        held = self._held.setdefault(layer, {})
        with torch._C.DisableTorchFunctionSubclass():
            for place, parameter in enumerate(home.parameters):
                if isinstance(parameter.grad, ConsumedGradient):
                    raise consumed_error()
                if parameter.grad is not None and self._takes(home, place):
                    raise OffloadedModelError(
                        f"update='in_backward' adds to no gradient that is there already (got one on a parameter of "
                        f"{home.name}); call optimizer.zero_grad() before backward(), or use update='deferred'"
                    )
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
        taken = [place for place in places if self._takes(home, place)]
        updated = self._down_and_update(home, slot, taken) if taken else None
        if len(taken) < len(places):
            self._keep(layer, slot, [place for place in places if place not in taken])
        return updated

    def _takes(self, home: Home, place: int) -> bool:
        """Whether the gradient is used for an update at once, rather than kept for the user."""
        return self.updater is not None and self.updater.in_backward and self.updater.updates(home, place)

    def _keep(self, layer: int, slot: _DeviceSlot, places: Sequence[int]) -> None:
        home, held, down = self.homes[layer], self._held[layer], self.device.gradients
        buffer = home.place_gradients(self.device)
        for place in places:
            if place not in held and (lent := self._lent.get((layer, place))) is not None and not lent.expired():
                held[place] = torch.zeros(home.shapes[place], dtype=home.dtype)  # the user has kept the one before
        fresh = [place for place in places if place not in held]
        self._copy_down(home, slot, fresh, buffer)
        for place in fresh:
            held[place] = home.gradient_in(buffer, place)
            self._lent[layer, place] = StorageWeakRef(held[place].untyped_storage())
        again = [place for place in places if place not in fresh]
        if again:
            self._add(home, slot, again, held)
        else:
            self._down = slot.drained = down.record()

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
            for layer, place in self._consumed:
                parameter = self.homes[layer].parameters[place]
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

    def _fit(self) -> None:
        """Allocates slots and staging as long as the longest layer's gradients; again only after an unfreezing."""
        longest = max(home.gradient_layout.total_bytes for home in self.homes)
        if longest > (self._slots[0].flat.numel() if self._slots else 0):
            self._outgrown += [*self._slots, *self._staging]  # copies may still be under way in them
            self._slots = [_DeviceSlot(self.device.buffer(longest)) for _ in range(RING)]
            self._staging = [_Staging(self.device.host_buffer(longest)) for _ in range(RING)]

    def _view(self, flat: Tensor, home: Home, place: int) -> Tensor:
        layout, number = home.gradient_layout, home.gradient_places.index(place)
        begin, size = layout.offsets[number], layout.sizes[number]
        return flat[begin : begin + size].view(home.dtype).view(home.shapes[place])

    def _copy_down(self, home: Home, slot: _DeviceSlot, places: Sequence[int], buffer: HostBuffer) -> None:
        for begin, length in home.gradient_layout.runs([home.gradient_places.index(place) for place in places]):
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
        return staging, {place: home.gradient_in(staging.buffer, place) for place in places}

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
        if not self._consumed.isdisjoint((home.index, place) for place in places):
            raise OffloadedModelError(
                f"{home.name} received gradients twice in one backward pass, and update='in_backward' had already "
                "used the first; use update='deferred'"
            )
        staging, views = self._stage(home, slot, places)
        self._consumed.update((home.index, place) for place in places)
        assert slot.drained is not None
        staging.free = self.updater.update_now(home, views, slot.drained)
        return staging.free
