"""Carries the schedule out: layers into slots and out of them, in the order of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stronghold.device import Device, Wait, Waits
from stronghold.schedule import Action, Computation, Move, Schedule
from stronghold.store import Store
from stronghold.unit import BoundParameter, OffloadedParameter, Unit, become, check_unmoved, own_write_error, set_data
from stronghold.window.slot import Slot, kept_by_another, lies_in
from stronghold.window.traffic import Traffic
from stronghold.window.written import Written


class Window:
    """The slots, what is in them, and the parameters that look into them.

    ``units`` are the layers in order. All slots are allocated here, once, each as long as the longest layer that is
    not resident; a resident layer is its own slot. The schedule knows of the others alone, which it counts from zero.
    """

    def __init__(self, units: Sequence[Unit], size: int, device: Device, store: Store, waits: Waits) -> None:
        self.units = units
        self._streamed = [layer for layer, unit in enumerate(units) if not unit.resident]
        self._number = {layer: number for number, layer in enumerate(self._streamed)}
        self.schedule = Schedule(len(self._streamed), size) if self._streamed else None
        self.device = device
        self.store = store
        self.waits = waits
        self.traffic = Traffic()
        longest = max((units[layer].slot_bytes for layer in self._streamed), default=0)
        flats = [device.buffer(longest) for _ in range(size if self._streamed else 0)]
        allocated = device.record_event()
        self.slots = [Slot(flat, read=allocated) for flat in flats]
        self._free = list(reversed(self.slots))
        self._where = {layer: _own_slot(unit) for layer, unit in enumerate(units) if unit.resident}
        self._bound: dict[int, list[int]] = {}
        """The layers whose parameters are in their slot, with the versions that these had when they came there."""
        self._digests: Mapping[int, Tensor] = {}
        """Those of the host weights, where the user may write them, of the layer of the backward pass under way."""
        self._begun: object = None
        """When the computation under way began."""
        self._changing = False
        """Whether layers are being updated, or have been, that :meth:`changed` has not been told of."""
        self._moving = False
        """Whether moves that the schedule counts on are not all made: under way, or given up where Ctrl-C came."""

    @property
    def size(self) -> int:
        """The number of slots."""
        return len(self.slots)

    def empty(self) -> None:
        """Gives the slots back; the window cannot be used after it."""
        self._where, self._free, self.slots = {}, [], []

    def begin_forward(self, layer: int, *, training: bool, behind: Sequence[int]) -> None:
        """Brings ``layer`` onto the device and points its parameters into its slot."""
        self._check_ended()
        if (schedule := self._scheduled(layer)) is not None:
            moves = schedule.begin_forward(self._number[layer], training=training, behind=self._numbers(behind))
            self._carry_out(moves)
        self._bind(layer, forward=True)

    def end_forward(self, layer: int, *, returning: bool) -> None:
        """Points the parameters back to the host and lets the schedule use the slot."""
        try:
            self._unbind(layer)
        finally:
            self.computed(layer, backward=False)
            if (schedule := self._scheduled(layer)) is not None:
                self._where[layer].read = self.device.record_event()
                self._carry_out(schedule.end_forward(returning=returning))

    def begin_backward(self, layer: int, remaining: Sequence[int]) -> None:
        self._check_ended()
        if (schedule := self._scheduled(layer)) is not None:
            self._carry_out(schedule.begin_backward(self._number[layer], self._numbers(remaining)))
        self._digests = self.units[layer].computed_with.digests
        self._bind(layer, forward=False)

    def end_backward(self, layer: int, *, failed: bool = False) -> None:
        written = self._written(layer) if failed else None
        try:
            self._unbind(layer)
        finally:
            if (schedule := self._scheduled(layer)) is not None:
                self._where[layer].read = self.device.record_event()
                self._carry_out(schedule.end_backward())
        if written is not None:
            written.take_over()

    def to_change(self) -> None:
        """Called before layers are updated: until :meth:`changed` has been, what the slots hold may be stale."""
        self._changing = True

    def changed(self, layers: Iterable[int]) -> None:
        """Drops layers whose update is under way and begins to fetch what comes next."""
        if (schedule := self._asked()) is not None:
            numbers = self._numbers(layers)
            for number in numbers:
                self.store.changed(self.units[self._streamed[number]])
            self._carry_out(schedule.changed(numbers))
        self._changing = False

    def leave_out(self, layers: Iterable[int], among: Iterable[int]) -> None:
        """Fetches of the layers ``among``, which come next, all but ``layers``: these are not needed in this pass."""
        if (schedule := self._asked()) is not None:
            numbers = self._numbers(layers)
            for number in set(numbers) - schedule.held:
                self.traffic.spared += 1
                self.traffic.spared_bytes += self.units[self._streamed[number]].layout.total_bytes
            self._carry_out(schedule.leave_out(numbers, self._numbers(among)))

    def follow(self, order: Iterable[Computation]) -> None:
        """Foresees the computations of ``order``, again and again; of resident layers nothing needs to be foreseen."""
        if self.schedule is not None:
            number = self._number
            self.schedule.follow([Computation(number[layer], back) for layer, back in order if layer in number])

    def _scheduled(self, layer: int) -> Schedule | None:
        return None if self.units[layer].resident else self._asked()

    def _asked(self) -> Schedule | None:
        """Returns the schedule to be asked for moves, which are to be carried out next."""
        if self._moving:
            self._start_over()
        self._moving = self.schedule is not None
        return self.schedule

    def _check_ended(self) -> None:
        """Starts over where an error, such as Ctrl-C, has left a layer in computation or moves half made."""
        if self._moving or self._bound or self._changing:
            self._start_over()

    def _start_over(self) -> None:
        """Gives up what is in the slots. What was given to the fetches' stream comes before what they fetch next."""
        for layer in list(self._bound):
            self._point_back(layer)
        self.store.start_over()
        computed = self.device.record_event()
        for slot in self.slots:
            slot.read = computed
        self._where = {layer: slot for layer, slot in self._where.items() if self.units[layer].resident}
        self._free = list(reversed(self.slots))
        if self.schedule is not None:
            self.schedule.start_over()
        self._moving = self._changing = False

    def _numbers(self, layers: Iterable[int]) -> list[int]:
        return [self._number[layer] for layer in layers if layer in self._number]

    def views(self, layer: int) -> list[Tensor]:
        """Returns the tensors of ``layer`` in the slot that holds it."""
        slot, unit = self._where[layer], self.units[layer]
        if unit.resident:
            return unit.weight
        if layer not in slot.views:
            with torch.inference_mode(False):  # what is made under it cannot be trained with, and these are kept
                slot.views[layer] = [
                    slot.flat[offset : offset + size].view(dtype).view(shape)
                    for offset, size, dtype, shape in zip(
                        unit.layout.offsets, unit.layout.sizes, unit.dtypes, unit.shapes, strict=True
                    )
                ]
        return slot.views[layer]

    def place_of(self, layer: int) -> int:
        """Returns the address of the first byte of the slot that holds ``layer``."""
        return self._where[layer].begin

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a slot."""
        return tensor.device.type == self.device.torch_device.type and lies_in(self.slots, tensor)

    def kept_by_another(self, layer: int) -> Tensor | None:
        """Returns a tensor over the slot that holds ``layer`` that another has, as far as Python knows of one."""
        return kept_by_another(self._where[layer], self.units[layer])

    def users(self, layer: int) -> int:
        """Returns how many tensors, the engine's own among them, use the memory of the slot that holds ``layer``."""
        return torch._C._storage_Use_Count(self._where[layer].flat.untyped_storage()._cdata)

    def is_bound(self, layer: int) -> bool:
        return layer in self._bound

    def part(self, layer: int, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Returns the tensor that begins ``offset`` elements of its ``dtype`` behind the slot's first byte."""
        slot = self._where[layer]
        if dtype not in slot.as_dtype:
            usable = slot.flat.numel() // dtype.itemsize * dtype.itemsize
            with torch.inference_mode(False):
                slot.as_dtype[dtype] = slot.flat[:usable].view(dtype)
        whole = slot.as_dtype[dtype]
        return torch.as_strided(whole, shape, stride, whole.storage_offset() + offset)

    def _carry_out(self, moves: Iterable[Move]) -> None:
        for move in moves:
            layer = self._streamed[move.layer]
            if move.action is Action.EVICT:
                self._free.append(self._where.pop(layer))
                continue
            unit = self.units[layer]
            check_unmoved(unit)
            slot = self._free.pop()
            self._where[layer] = slot
            self.waits.stream(self.device.fetches, slot.read, Wait.SLOT_FREE)
            # The update runs on the host: the first layer's may be done when the last one's has not begun.
            self.waits.stream(self.device.fetches, unit.updated, Wait.UPDATED)
            with self.device.noted(self.device.fetches, f"fetch {unit.name}"):
                self.store.fetch(unit, slot.flat)
            slot.ready = self.device.fetches.record()
            unit.fetched.begin(slot.ready, self.waits)
            self.traffic.fetches += 1
            self.traffic.fetched_bytes += unit.layout.total_bytes
        if (count := self.store.lookahead) and self.schedule is not None:
            # By the schedule, for it knows what comes next; as soon as it is known, for a disk is slow.
            self.store.expect([self.units[self._streamed[number]] for number in self.schedule.ahead(count)])
        self._moving = False

    def computed(self, layer: int, *, backward: bool, failed: bool = False) -> None:
        """Tells the device that the computation of ``layer`` has been issued in full, or has ``failed``."""
        unit, slot = self.units[layer], self._where[layer]
        if backward:  # now, for an update may come next
            unit.own_writes.compare(unit.parameters, failed=failed)
        if layer not in slot.wholes:
            slot.wholes[layer] = slot.flat[: unit.layout.total_bytes]
        self.device.computed([slot.wholes[layer]], unit.elements, backward=backward)
        if (timeline := self.device.timeline) is not None and self._begun is not None:
            name = f"{'backward' if backward else 'forward'} {unit.name}"
            timeline.add("compute", name, self._begun, self.device.stamp())
        self._begun = None

    def _bind(self, layer: int, *, forward: bool) -> None:
        unit, slot = self.units[layer], self._where[layer]
        unit.own_writes.begin(forward=forward)
        if unit.resident:
            self._begun = self.device.stamp() if self.device.timeline is not None else None
        else:
            self._wait_for(unit, slot)
        self._bound[layer] = unit.versions_now()
        become(BoundParameter, unit.parameters)
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view in () if unit.resident else zip(unit.parameters, self.views(layer), strict=True):
                set_data(parameter, view)

    def _wait_for(self, unit: Unit, slot: Slot) -> None:
        begin = self.device.stamp()
        late_update = unit.updated is not None and not unit.updated.done
        # The slot is not read before the fetch has filled it, which waits for the update: nothing here has to.
        self.waits.compute(slot.ready, Wait.FETCHED)
        unit.fetched.use(held=bool(unit.aliased))
        waits = self.traffic.update_waits if late_update else self.traffic.fetch_waits
        if unit.lives("weights") == "disk":
            waits = self.traffic.disk_waits
        ready = self.device.stamp()
        waits.append((begin, ready))
        if (timeline := self.device.timeline) is not None:
            timeline.add("waits", f"for {unit.name}", begin, ready)
        self._begun = ready

    def _written(self, layer: int) -> Written | None:
        """Returns what the user has written of a bound layer since its pass failed, which is no error."""
        unit = self.units[layer]
        if unit.is_common:  # other processes may have updated it since
            return None
        self._bound[layer] = unit.versions_now()
        return None if unit.resident else Written(unit, self._digests)

    def _unbind(self, layer: int) -> None:
        unit = self.units[layer]
        try:
            before, versions = self._bound.get(layer, unit.versions), unit.versions_now()
            unit.own_writes.compare(unit.parameters)
            self._point_back(layer)
        except BaseException:  # Ctrl-C: what the user reads of the layer then is what the host has
            self._point_back(layer)
            raise
        if unit.own_writes.found or versions != before:
            if unit.versions == before:  # else the user has written them outside as well
                unit.versions = versions
            raise own_write_error(unit.name)

    def _point_back(self, layer: int) -> None:
        unit = self.units[layer]
        unit.own_writes.end()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, weight in () if unit.resident else zip(unit.parameters, unit.weight, strict=True):
                set_data(parameter, weight)
        become(OffloadedParameter, unit.parameters)
        self._bound.pop(layer, None)


def _own_slot(unit: Unit) -> Slot:
    assert unit.buffer is not None
    return Slot(unit.buffer.flat)
