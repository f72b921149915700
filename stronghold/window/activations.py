"""``activations="host"`` and ``"disk"``: the layers' inputs wait beside the device for the backward pass."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stronghold.device import Device, Event, Stream, Wait, Waits
from stronghold.unit import opaque
from stronghold.window.shelves import DiskShelf, HostShelf, Inputs, Shelf
from stronghold.window.traffic import Traffic
from stronghold.window.window import Window

SLOTS = 2
"""Device buffers in each direction: one for the layer that computes, one in transit."""


@dataclass
class _InputSlot:
    flat: Tensor
    event: Event | None = None
    used_bytes: int = 0
    version: int | None = None
    inputs: weakref.ref[Inputs] | None = None


class KeptInput:
    """One of the inputs of a run, the one of this ``number``, that is not on the device; or what shares its memory."""

    def __init__(self, tensor: Tensor, inputs: Inputs, number: int) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        # Dense, in the order of the tensor's own dimensions: a channels-last input stays one.
        self.stride = torch.empty_like(tensor, device="meta").stride()
        self.inputs = inputs
        self.offset, self.length_bytes = inputs.layout.offsets[number], inputs.layout.sizes[number]
        assert self.length_bytes == tensor.numel() * tensor.element_size()

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """Returns the tensor that lies at ``offset`` bytes in ``flat``."""
        span = flat[offset : offset + self.length_bytes].view(self.dtype)
        return torch.as_strided(span, self.shape, self.stride)


class Activations:
    """Saved-tensor hooks that keep the inputs of layers off the device, and bring the next ones up ahead of time.

    Each input is copied into a device slot and from there to the shelf's memory on the host, so that autograd may free
    it at once; on the way back all inputs of a run lie in one slot, which itself is what the layer computes with.
    """

    def __init__(self, device: Device, waits: Waits, shelf: Shelf, traffic: Traffic) -> None:
        self.device = device
        self.waits = waits
        self.shelf = shelf
        self._traffic = traffic
        self._outgrown: list[_InputSlot] = []
        self._down: deque[_InputSlot] = deque()
        self._up: deque[_InputSlot] = deque()
        self._runs: list[weakref.ref[Inputs]] = []
        self._slots: weakref.WeakKeyDictionary[Inputs, _InputSlot] = weakref.WeakKeyDictionary()
        """The slots that hold runs' inputs on the device, or soon will."""

    @property
    def streams(self) -> list[Stream]:
        return self.shelf.streams

    def keeping(self, layer: str, tensors: Sequence[Tensor]) -> Callable[[Tensor], KeptInput | None]:
        """Returns what sends an input of one run of ``layer`` down, of ``tensors``; None for one that stays."""
        return functools.partial(self._keep, self._begun(layer, tensors))

    def sending(self, layer: str, tensors: Sequence[Tensor]) -> Callable[[Tensor], KeptInput | None]:
        """Returns what sends a tensor down that autograd saves in a run of ``layer`` with these inputs.

        It returns None for one that stays where it is: one that is not the memory of an input with a gradient.
        """
        inputs = self._begun(layer, tensors)
        numbers = {t.data_ptr(): number for number, t in enumerate(t for t in tensors if self._goes(t))}
        sent: set[int] = set()

        def send(tensor: Tensor) -> KeptInput | None:
            if tensor.device != self.device.torch_device or not tensor.numel():
                return None
            number = numbers.get(tensor.data_ptr())
            if number is None or inputs.layout.sizes[number] != tensor.numel() * tensor.element_size():
                return None
            if number in sent:
                return KeptInput(tensor, inputs, number)
            sent.add(number)
            return self._send(inputs, tensor, number)

        return send

    def _begun(self, layer: str, tensors: Sequence[Tensor]) -> Inputs:
        inputs = Inputs(layer, self.shelf.layout(input_sizes([t for t in tensors if self._goes(t)])))
        self._runs = [reference for reference in self._runs if reference() is not None]
        self._runs.append(weakref.ref(inputs))
        return inputs

    def _goes(self, tensor: Tensor) -> bool:
        """Whether an input goes down: tensors without gradient (masks, positions) stay where they are."""
        return tensor.device == self.device.torch_device and bool(input_sizes([tensor]))

    @opaque
    def _keep(self, inputs: Inputs, tensor: Tensor) -> KeptInput | None:
        return self._send(inputs, tensor, inputs.kept) if self._goes(tensor) else None

    def _send(self, inputs: Inputs, tensor: Tensor, number: int) -> KeptInput:
        room, kept = self.shelf.room(inputs), KeptInput(tensor, inputs, number)
        inputs.kept += 1
        slot = self._next(self._down, kept.length_bytes)
        begin = self.device.stamp() if self.shelf.on_disk else None
        # The copy down of the input that used this slot before must have read it.
        self.waits.compute(slot.event, Wait.INPUT_SLOT_FREE)
        if begin is not None:  # that copy waits for staging, which the disk frees
            self._waited(begin, inputs)
        self.device.compute_copy(kept.view(slot.flat, 0), tensor)
        down = self.device.gradients
        # The computation may lag behind the host, so that the slot is not filled yet when this is issued.
        self.waits.stream(down, self.device.record_event(), Wait.INPUT_WRITTEN)
        with self.device.noted(down, f"inputs down {inputs.layer}"):
            down.copy(room[kept.offset : kept.offset + kept.length_bytes], slot.flat[: kept.length_bytes])
        slot.event = down.record()
        self.shelf.arrived(inputs, kept.offset, kept.length_bytes, slot.event)
        return kept

    def value(self, packed: KeptInput) -> Tensor:
        """Returns the input on the device, and begins to bring up those that the backward pass needs next."""
        inputs = packed.inputs
        known = self._slots.get(inputs)
        if known is None or known.version not in (None, known.flat._version):  # a layer may write its inputs
            self._bring_up(inputs)
        slot = self._slots[inputs]
        self._wait_for(inputs, slot)
        slot.version = slot.flat._version  # the copy up has written it by now, and the layer that gets it has not
        alive = [run for reference in self._runs if (run := reference()) is not None and run.kept]
        place = next((i for i, run in enumerate(alive) if run is inputs), 0)
        coming = alive[:place][::-1]
        if coming and coming[0] not in self._slots:
            self._bring_up(coming[0], spared=slot)
        self.shelf.expect(coming)
        return packed.view(slot.flat, packed.offset)

    def _wait_for(self, inputs: Inputs, slot: _InputSlot) -> None:
        begin = self.device.stamp()
        # The layer must not compute with its input before it has arrived.
        self.waits.compute(slot.event, Wait.INPUT_UP)
        self._waited(begin, inputs)

    def _waited(self, begin: object, inputs: Inputs) -> None:
        end = self.device.stamp()
        (self._traffic.disk_waits if self.shelf.on_disk else self._traffic.fetch_waits).append((begin, end))
        if (timeline := self.device.timeline) is not None:
            timeline.add("waits", f"for the inputs of {inputs.layer}", begin, end)

    def _bring_up(self, inputs: Inputs, *, spared: _InputSlot | None = None) -> None:
        """Begins to copy inputs up, into another slot than the one ``spared``, which is about to be computed with."""
        length = inputs.layout.total_bytes
        slot = self._next(self._up, length, spared)
        if slot.inputs is not None and (before := slot.inputs()) is not None:
            self._slots.pop(before, None)  # the backward pass is past it; should it come back, it is brought up again
        up = self.device.fetches
        self.device.computed([slot.flat[: slot.used_bytes]], 0, backward=True)
        # The computation with the slot's last inputs has been issued in full: the backward pass is past it.
        self.waits.stream(up, self.device.record_event(), Wait.INPUT_SLOT_READ)
        source, there = self.shelf.source(inputs)
        # The host must have the inputs before they are copied up again.
        self.waits.stream(up, there, Wait.INPUT_DOWN)
        with self.device.noted(up, f"inputs up {inputs.layer}"):
            up.copy(slot.flat[:length], source[:length])
        slot.event = up.record()
        self.shelf.copied_up(inputs, slot.event)
        slot.inputs, slot.used_bytes, slot.version = weakref.ref(inputs), length, None
        self._slots[inputs] = slot

    def _next(self, slots: deque[_InputSlot], length: int, spared: _InputSlot | None = None) -> _InputSlot:
        if not slots or slots[0].flat.numel() < length:
            # Copies may still be under way in those that are too short now.
            self._outgrown = [slot for slot in (*self._outgrown, *slots) if slot.event and not slot.event.done]
            longer = deque(_InputSlot(self.device.buffer(length)) for _ in range(SLOTS))
            slots.clear()
            slots.extend(longer)
        # The one that is spared comes next where a run was in between that nobody had expected. In one go: where Ctrl-C
        # came between a slot's way out and in, there would be one less.
        slots.rotate(-2 if slots[0] is spared else -1)
        return slots[-1]


def input_sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the bytes of those of a run's inputs that are kept off the device: the ones that get gradients.

    One that is expanded, or a part of others, is not: it would come back dense, for which PyTorch computes otherwise.
    """
    return [t.numel() * t.element_size() for t in tensors if t.requires_grad and t.numel() and _is_dense(t)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie one behind the other, in whatever order of its dimensions."""
    if tensor.layout != torch.strided:
        return False
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != length:
                return False
            length *= size
    return True


def activations_of(kind: int | str, window: Window) -> Activations | None:
    """Returns what keeps inputs off the device in ``activations=kind``, beside a window; None where they stay there."""
    if kind not in ("host", "disk"):
        return None
    shelf: Shelf = (HostShelf if kind == "host" else DiskShelf)(window.device, window.waits, window.store)
    return Activations(window.device, window.waits, shelf, window.traffic)
