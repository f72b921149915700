"""``activations="host"``: the layers' inputs wait in host memory for the backward pass."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stronghold.device import Device, Event, HostBuffer
from stronghold.window.waits import Wait, Waits

SLOTS = 2
"""Device buffers in each direction: one for the layer that computes, one in transit."""


@dataclass
class _Slot:
    flat: Tensor
    event: Event | None = None
    used_bytes: int = 0


class _Kept:
    """One input that lies in host memory; it gives its memory back when autograd lets go of it."""

    def __init__(self, tensor: Tensor, buffer: HostBuffer, down: Event) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.length_bytes = tensor.numel() * tensor.element_size()
        self.buffer = buffer
        self.down = down
        self.slot: _Slot | None = None


class HostActivations:
    """Saved-tensor hooks that keep the inputs of layers on the host, and bring the next one up ahead of time.

    Each input is copied into a device slot and from there to the host, so that autograd may free it at once; on the
    way back the slot itself is what the layer computes with. Host buffers are reused from step to step.
    """

    def __init__(self, device: Device, waits: Waits) -> None:
        self.device = device
        self.waits = waits
        self._outgrown: list[_Slot] = []
        self._down: list[_Slot] = []
        self._up: list[_Slot] = []
        self._kept: list[weakref.ref[_Kept]] = []
        self._pool: dict[int, list[HostBuffer]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Sends a layer's input down; tensors without gradient (masks, positions) stay where they are."""
        if not tensor.requires_grad or tensor.device != self.device.torch_device or not tensor.numel():
            return tensor
        source = tensor.detach().contiguous()
        length = source.numel() * source.element_size()
        slot = self._next(self._down, length)
        # The copy down of the input that used this slot before must have read it.
        self.waits.compute(slot.event, Wait.INPUT_SLOT_FREE)
        view = slot.flat[:length]
        self.device.compute_copy(view.view(source.dtype).view(source.shape), source)
        buffer = self._take(length)
        down = self.device.gradients
        # The computation may lag behind the host, so that the slot is not filled yet when this is issued.
        self.waits.stream(down, self.device.compute_mark(), Wait.INPUT_WRITTEN)
        down.copy(buffer.flat, view)
        slot.event = down.record()
        kept = _Kept(source, buffer, slot.event)
        self._kept.append(weakref.ref(kept))
        weakref.finalize(kept, self._pool.setdefault(length, []).append, buffer)
        return kept

    def unpack(self, packed: Any) -> Tensor:
        """Returns the input on the device, and begins to bring up the one that the backward pass needs next."""
        if isinstance(packed, Tensor):
            return packed
        if packed.slot is None:
            self._bring_up(packed)
        slot, packed.slot = packed.slot, None
        # The layer must not compute with its input before it has arrived.
        self.waits.compute(slot.event, Wait.INPUT_UP)
        alive = [kept for kept in (reference() for reference in self._kept) if kept is not None]
        self._kept = [weakref.ref(kept) for kept in alive]
        place = next((i for i, kept in enumerate(alive) if kept is packed), 0)
        if place and alive[place - 1].slot is None:
            self._bring_up(alive[place - 1])
        return slot.flat[: packed.length_bytes].view(packed.dtype).view(packed.shape)

    def _bring_up(self, kept: _Kept) -> None:
        slot = self._next(self._up, kept.length_bytes)
        up = self.device.fetches
        self.device.computed([slot.flat[: slot.used_bytes]], 0, backward=True)
        # The computation with the slot's last input has been issued in full: the backward pass is past it.
        self.waits.stream(up, self.device.compute_mark(), Wait.INPUT_SLOT_READ)
        # The host must have the input before it is copied up again.
        self.waits.stream(up, kept.down, Wait.INPUT_DOWN)
        up.copy(slot.flat[: kept.length_bytes], kept.buffer.flat)
        slot.event = up.record()
        kept.slot, slot.used_bytes = slot, kept.length_bytes

    def _next(self, slots: list[_Slot], length: int) -> _Slot:
        if not slots or slots[0].flat.numel() < length:
            self._outgrown += slots  # copies may still be under way in them
            slots[:] = [_Slot(self.device.buffer(length)) for _ in range(SLOTS)]
        slots.append(slots.pop(0))
        return slots[-1]

    def _take(self, length: int) -> HostBuffer:
        # What may still be on its way up from a buffer in the pool, nobody waits for any more.
        pool = self._pool.get(length)
        return pool.pop() if pool else self.device.host_buffer(length)
