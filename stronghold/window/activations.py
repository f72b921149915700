"""``activations="host"``: the layers' inputs wait in host memory for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Device, Event, HostBuffer, Wait, Waits
from stronghold.layout import ALIGNMENT_BYTES
from stronghold.unit import opaque

SLOTS = 2
"""Device buffers in each direction: one for the layer that computes, one in transit."""


@dataclass
class _InputSlot:
    flat: Tensor
    event: Event | None = None
    used_bytes: int = 0
    inputs: weakref.ref[_Inputs] | None = None


class _Inputs:
    """The inputs of one run of a layer, which come up together; they live as long as autograd keeps one of them."""

    def __init__(self) -> None:
        self.kept: list[weakref.ref[KeptInput]] = []
        self.length_bytes = 0
        self.slot: _InputSlot | None = None
        """The slot that holds them on the device, or soon will."""


class KeptInput:
    """One input that lies in host memory; it gives its memory back when autograd lets go of it."""

    def __init__(self, tensor: Tensor, buffer: HostBuffer, inputs: _Inputs) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        # Dense, in the order of the tensor's own dimensions: a channels-last input stays one.
        self.stride = torch.empty_like(tensor, device="meta").stride()
        self.length_bytes = tensor.numel() * tensor.element_size()
        self.buffer = buffer
        self.down: Event | None = None
        self.inputs = inputs
        self.offset = inputs.length_bytes
        inputs.kept.append(weakref.ref(self))
        inputs.length_bytes += -(-self.length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """Returns the tensor that lies at ``offset`` bytes in ``flat``."""
        span = flat[offset : offset + self.length_bytes].view(self.dtype)
        return torch.as_strided(span, self.shape, self.stride)


class HostActivations:
    """Saved-tensor hooks that keep the inputs of layers on the host, and bring the next ones up ahead of time.

    Each input is copied into a device slot and from there to the host, so that autograd may free it at once; on the
    way back all inputs of a run lie in one slot, which itself is what the layer computes with. Host buffers are reused
    from step to step.
    """

    def __init__(self, device: Device, waits: Waits) -> None:
        self.device = device
        self.waits = waits
        self._outgrown: list[_InputSlot] = []
        self._down: list[_InputSlot] = []
        self._up: list[_InputSlot] = []
        self._runs: list[weakref.ref[_Inputs]] = []
        self._pool: list[HostBuffer] = []

    def inputs(self) -> AbstractContextManager[None]:
        """Returns the hooks under which autograd saves the inputs of one run of a layer."""
        inputs = self._begun()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(inputs, tensor), self._unpack)

    def sending(self, inputs: Iterable[Tensor]) -> Callable[[Tensor], KeptInput | None]:
        """Returns what sends a tensor down that autograd saves in a run of a layer with these ``inputs``.

        It returns None for one that stays where it is: one that is not in the memory of an input with a gradient.
        """
        run = self._begun()
        places = {tensor.data_ptr() for tensor in inputs if self._goes(tensor)}

        def send(tensor: Tensor) -> KeptInput | None:
            there = tensor.device == self.device.torch_device and bool(tensor.numel())
            return self._send(run, tensor) if there and tensor.data_ptr() in places else None

        return send

    def _begun(self) -> _Inputs:
        inputs = _Inputs()
        self._runs = [reference for reference in self._runs if reference() is not None]
        self._runs.append(weakref.ref(inputs))
        return inputs

    def _goes(self, tensor: Tensor) -> bool:
        """Whether an input goes down: tensors without gradient (masks, positions) stay where they are."""
        return tensor.requires_grad and tensor.device == self.device.torch_device and bool(tensor.numel())

    @opaque
    def _pack(self, inputs: _Inputs, tensor: Tensor) -> Any:
        return self._send(inputs, tensor) if self._goes(tensor) else tensor

    def _send(self, inputs: _Inputs, tensor: Tensor) -> KeptInput:
        kept = KeptInput(tensor, self._take(tensor.numel() * tensor.element_size()), inputs)
        weakref.finalize(kept, self._pool.append, kept.buffer)
        slot = self._next(self._down, kept.length_bytes)
        # The copy down of the input that used this slot before must have read it.
        self.waits.compute(slot.event, Wait.INPUT_SLOT_FREE)
        self.device.compute_copy(kept.view(slot.flat, 0), tensor)
        down = self.device.gradients
        # The computation may lag behind the host, so that the slot is not filled yet when this is issued.
        self.waits.stream(down, self.device.record_event(), Wait.INPUT_WRITTEN)
        down.copy(kept.buffer.flat[: kept.length_bytes], slot.flat[: kept.length_bytes])
        slot.event = kept.down = down.record()
        return kept

    @opaque
    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.value(packed)

    def value(self, packed: KeptInput) -> Tensor:
        """Returns the input on the device, and begins to bring up those that the backward pass needs next."""
        inputs = packed.inputs
        if inputs.slot is None:
            self._bring_up(inputs)
        slot = inputs.slot
        assert slot is not None
        # The layer must not compute with its input before it has arrived.
        self.waits.compute(slot.event, Wait.INPUT_UP)
        alive = [run for reference in self._runs if (run := reference()) is not None and run.kept]
        place = next((i for i, run in enumerate(alive) if run is inputs), 0)
        if place and alive[place - 1].slot is None:
            self._bring_up(alive[place - 1])
        return packed.view(slot.flat, packed.offset)

    def _bring_up(self, inputs: _Inputs) -> None:
        slot = self._next(self._up, inputs.length_bytes)
        if slot.inputs is not None and (before := slot.inputs()) is not None:
            before.slot = None  # the backward pass is past it; should it come back, it is brought up again
        up = self.device.fetches
        self.device.computed([slot.flat[: slot.used_bytes]], 0, backward=True)
        # The computation with the slot's last inputs has been issued in full: the backward pass is past it.
        self.waits.stream(up, self.device.record_event(), Wait.INPUT_SLOT_READ)
        for kept in (kept for reference in inputs.kept if (kept := reference()) is not None):
            # The host must have the input before it is copied up again.
            self.waits.stream(up, kept.down, Wait.INPUT_DOWN)
            place = slice(kept.offset, kept.offset + kept.length_bytes)
            up.copy(slot.flat[place], kept.buffer.flat[: kept.length_bytes])
        slot.event = up.record()
        slot.inputs, inputs.slot, slot.used_bytes = weakref.ref(inputs), slot, inputs.length_bytes

    def _next(self, slots: list[_InputSlot], length: int) -> _InputSlot:
        if not slots or slots[0].flat.numel() < length:
            # Copies may still be under way in those that are too short now.
            self._outgrown = [slot for slot in self._outgrown + slots if slot.event and not slot.event.done]
            slots[:] = [_InputSlot(self.device.buffer(length)) for _ in range(SLOTS)]
        slots.append(slots.pop(0))
        return slots[-1]

    def _take(self, length: int) -> HostBuffer:
        # What may still be on its way up from a buffer in the pool, nobody waits for any more.
        fitting = [buffer for buffer in self._pool if buffer.length_bytes >= length]
        if not fitting:
            return self.device.host_buffer(length, private=True)
        buffer = min(fitting, key=lambda buffer: buffer.length_bytes)
        self._pool.remove(buffer)
        return buffer
