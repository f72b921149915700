"""The way down for gradients of which a machine's replicas have a share each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stronghold.device import Device, HostBuffer, Waits
from stronghold.layout import ALIGNMENT_BYTES, lay_out, round_up
from stronghold.planner.link_bytes import all_reduce_bytes, reduce_scatter_bytes
from stronghold.unit import Unit
from stronghold.window.grad_offload import DeviceSlot, GradOffload
from stronghold.window.sums import spread, squares_of


@dataclass(frozen=True)
class Regions:
    """How a layer's gradients lie in a slot: for each dtype a region for the share of each replica here.

    ``of_dtype`` are the (begin, length) in bytes of a dtype's regions, all of one length one behind the other.
    ``spans`` are the (begin, length) of each replica's share of each of the gradients at ``indices``.
    """

    indices: tuple[int, ...]
    of_dtype: dict[torch.dtype, tuple[int, int]]
    spans: list[list[tuple[int, int]]]

    @property
    def total_bytes(self) -> int:
        return sum(length for _, length in self.of_dtype.values())


class SharedGradOffload(GradOffload):
    """A slot holds the shares of a layer's gradients one behind the other, then a square for each gradient.

    Once they are there the stream of the copies reduce-scatters them among the machine's replicas, and adds up each
    share over the machines: what is copied down is this replica's share of the mean of all. The squares are those of
    the whole mean, the same in all replicas.
    """

    def __init__(self, units: Sequence[Unit], device: Device, waits: Waits) -> None:
        self._known: dict[Unit, Regions] = {}
        super().__init__(units, device, waits)

    def slot_bytes(self, unit: Unit) -> int:
        return shared_slot_bytes(unit)

    def put(self, unit: Unit, index: int, gradient: Tensor, *, add: bool) -> None:
        values = gradient.detach().reshape(-1)
        for number, (begin, end) in enumerate(unit.shares(index)):
            self.device.compute_copy(self._share(self.slot, unit, index, number), values[begin:end], add=add)

    def send(self, unit: Unit, indices: Sequence[int], threads: int, found_inf: Tensor | None) -> DeviceSlot:
        slot, lane = self.slot, unit.replicas.gradients
        unit.handed_out.check(unit.name, gradients=False)
        unit.handed_out.forget(weights=found_inf is not None)  # which others may update from here on, in_backward
        gradients = [self._share(slot, unit, index, unit.replicas.local_rank) for index in indices]
        # All that are trained, whatever has a gradient here: where another replica has others, that is told at the end.
        trained = unit.gradients.indices
        places = None if len(indices) == len(trained) else [trained.index(index) for index in indices]
        squares = [self._square(slot, unit, index) for index in trained]
        regions = self._regions_of(unit).of_dtype.items()
        flats = [slot.flat[begin : begin + length].view(dtype) for dtype, (begin, length) in regions]

        def reduce() -> None:
            for flat in flats:
                lane.reduce_scatter_mean(flat)
            total = squares_of(gradients, threads)
            if places is not None:
                total = total.new_zeros(len(trained)).index_copy_(0, torch.tensor(places, device=total.device), total)
            lane.sum(total)
            spread(total, squares, found_inf)

        replicas = unit.replicas
        for flat in flats:
            share = flat.numel() // replicas.local_world_size
            self.traffic.reduced_bytes += reduce_scatter_bytes(flat.numel(), flat.itemsize, replicas.local_world_size)
            self.traffic.crossed_bytes += all_reduce_bytes(
                share, flat.itemsize, replicas.world_size // replicas.local_world_size
            )
        self._turn()
        with self.device.noted(self.device.gradients, f"reduce-scatter {unit.name}"):
            self.device.gradients.compute(reduce)
        return slot

    def copy(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int], buffer: HostBuffer) -> None:
        with self.device.noted(self.device.gradients, f"gradients {unit.name}"):
            for index in indices:
                source = self._share(slot, unit, index, unit.replicas.local_rank)
                self._copy(unit.own(index, unit.gradients.view(buffer, index)), source)
                self._copy(unit.gradients.squares(buffer, index), self._square(slot, unit, index))

    def _share(self, slot: DeviceSlot, unit: Unit, index: int, number: int) -> Tensor:
        """Returns, flat, a replica's share of the gradient of one parameter."""
        regions = self._regions_of(unit)
        begin, length = regions.spans[number][unit.gradients.indices.index(index)]
        return slot.flat[begin : begin + length].view(unit.dtypes[index])

    def _square(self, slot: DeviceSlot, unit: Unit, index: int) -> Tensor:
        begin = self._squares_begin(unit) + 8 * unit.gradients.indices.index(index)
        return slot.flat[begin : begin + 8].view(torch.float64).view(())

    def _squares_begin(self, unit: Unit) -> int:
        return self._regions_of(unit).total_bytes

    def _regions_of(self, unit: Unit) -> Regions:
        known = self._known.get(unit)
        if known is None or known.indices != unit.gradients.indices:
            known = self._known[unit] = _regions(unit)
        return known


def shared_slot_bytes(unit: Unit) -> int:
    """Returns what the gradients of a layer take in a slot, region by region, with their squares."""
    return _regions(unit).total_bytes + 8 * len(unit.gradients.indices)


def _regions(unit: Unit) -> Regions:
    count, indices = unit.replicas.local_world_size, unit.gradients.indices
    of_dtype: dict[torch.dtype, tuple[int, int]] = {}
    spans: list[list[tuple[int, int]]] = [[(0, 0)] * len(indices) for _ in range(count)]
    end = 0
    for dtype in dict.fromkeys(unit.dtypes[index] for index in indices):
        numbers = [number for number, index in enumerate(indices) if unit.dtypes[index] == dtype]
        shares = zip(*(unit.shares(indices[number]) for number in numbers), strict=True)
        layouts = [lay_out([(last - first) * dtype.itemsize for first, last in own]) for own in shares]
        each = round_up(max(layout.total_bytes for layout in layouts), ALIGNMENT_BYTES)
        for replica, layout in enumerate(layouts):
            for number, offset, size in zip(numbers, layout.offsets, layout.sizes, strict=True):
                spans[replica][number] = (end + replica * each + offset, size)
        of_dtype[dtype] = (end, each * count)
        end += each * count
    return Regions(indices=indices, of_dtype=of_dtype, spans=spans)
