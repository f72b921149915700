"""Where the gradients of one unit lie, and what is summed up with them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stronghold.device import Buffer, Device, HostBuffer
from stronghold.layout import Layout, lay_out
from stronghold.unit.users import Lent, is_shared

if TYPE_CHECKING:
    from stronghold.unit.gradient import GradMeta
    from stronghold.unit.unit import Unit


class GradientMemory:
    """The layout of a unit's gradients, without those of frozen parameters, and their memory on the host.

    Behind the gradients lies a float64 number for each: the sum of its squares, which travels with it.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit_reference = weakref.ref(unit)
        self.indices: tuple[int, ...] = ()
        """Whose gradients have room."""
        self.layout: Layout = lay_out([])
        self._low: Layout = lay_out([])
        """Of the low halves of sums, which gradients in fp32 have not."""
        self.buffer: HostBuffer | None = None
        self.known: dict[int, GradMeta] = {}
        """What is known of the newest gradient at each index."""
        self._squares: dict[int, Tensor] = {}
        self._lent: dict[int, Lent] = {}
        """Each gradient on the host that the user may have."""
        self._sums: Buffer | None = None
        self._sums_host: Buffer | None = None
        self.fit()

    @property
    def _unit(self) -> Unit:
        unit = self._unit_reference()
        assert unit is not None  # it owns this
        return unit

    def fit(self) -> bool:
        """Makes room for the parameters that are trained now; returns whether the layout has changed."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = {index for index, p in enumerate(self._unit.parameters) if p.requires_grad}
        if trained <= set(self.indices):
            return False
        self.indices = tuple(sorted(trained.union(self.indices)))
        sizes = [self._unit.layout.sizes[index] for index in self.indices]
        self.layout = lay_out([*sizes, *[8] * len(sizes)])
        self._low = lay_out([2 * self._unit.counts[p] * (self._unit.dtypes[p] != torch.float32) for p in self.indices])
        self.release()
        self._sums = self._sums_host = None
        return True

    def allocate(self, device: Device) -> HostBuffer:
        """Returns the host's gradients, in the compute dtype, allocated if there are none yet."""
        if self.buffer is None:
            unit, length = self._unit, self.layout.total_bytes
            unit.check_memory(host_bytes=length, device_bytes=0, what=f"gradients of {unit.name}")
            with torch.inference_mode(False):  # what is made in it cannot be written outside of it
                self.buffer = device.host_buffer(length, memory=unit.replicas.memory(length))
        return self.buffer

    def release(self) -> None:
        """Gives the host's gradients back."""
        self.buffer = None
        self._squares, self._lent = {}, {}

    def close(self) -> None:
        """Gives all of it back."""
        self.release()
        self.known = {}
        self._sums = self._sums_host = None

    def view(self, buffer: Buffer, index: int) -> Tensor:
        """Returns the gradient of one parameter in a buffer of this layout."""
        return buffer.view(self._offset(index), self._unit.shapes[index], self._unit.dtypes[index])

    def lend(self, index: int) -> Tensor:
        """Returns a tensor of its own over one of the host's gradients, which are allocated, for the user to have."""
        assert self.buffer is not None
        lent = self._lent.get(index)
        if lent is None or lent.tensor.data_ptr() != self.buffer.flat.data_ptr() + self._offset(index):
            # The user has had it moved where other processes have it as well.
            with torch.inference_mode(False):
                lent = self._lent[index] = Lent(self.view(self.buffer, index))
        return lent.tensor.data

    def is_lent(self, index: int) -> bool:
        """Whether there is still a tensor over what :meth:`lend` has returned, or its storage."""
        return index in self._lent and self._lent[index].has_others()

    def is_shared(self, index: int, gradient: Tensor) -> bool:
        """Whether the user has more than that one tensor over the memory of a gradient, which has a detached twin."""
        lent = self._lent.get(index)
        if lent is not None and lent.is_over(gradient):
            return lent.has_others(but=2)
        return is_shared(gradient)

    def squares(self, buffer: Buffer, index: int) -> Tensor:
        """Returns the sum of squares of one parameter's gradient in a buffer of this layout."""
        return buffer.view(self.squares_offset(index), (), torch.float64)

    def held_squares(self, index: int) -> Tensor:
        """Returns the same of the host's gradients, which are allocated."""
        assert self.buffer is not None
        if index not in self._squares:
            self._squares[index] = self.squares(self.buffer, index)
        return self._squares[index]

    def squares_offset(self, index: int) -> int:
        return self.layout.offsets[len(self.indices) + self.indices.index(index)]

    def remainder(self, index: int) -> Tensor | None:
        """Returns where the low halves of a sum of bf16 gradients lie: beside the gradient, 2 bytes per parameter.

        They are allocated when a second gradient is added to a first. None with fp32 compute, whose sums need none.
        """
        if self._unit.dtypes[index] == torch.float32:
            return None
        if self._sums is None:
            self._sums = self._sum_buffer(on_device=self._unit.resident or self._unit.has_device_copy)
        return self._sum_in(self._sums, index)

    def host_remainder(self, index: int) -> Tensor:
        """Returns where the low halves of a root parameter's sum arrive on the host."""
        if self._sums_host is None:
            self._sums_host = self._sum_buffer(on_device=False)
        return self._sum_in(self._sums_host, index)

    def kept_bytes(self, *, adds: bool) -> int:
        """Returns what gradients take on the host that are kept there, and added up."""
        return self.layout.total_bytes + (self.sum_bytes() if adds else 0)

    def sum_bytes(self) -> int:
        """Returns what :meth:`remainder` takes."""
        return self._low.total_bytes

    def _offset(self, index: int) -> int:
        return self.layout.offsets[self.indices.index(index)]

    def _sum_buffer(self, *, on_device: bool) -> Buffer:
        unit, size = self._unit, self.sum_bytes()
        unit.check_memory(
            host_bytes=0 if on_device else size,
            device_bytes=size if on_device else 0,
            what=f"adding up several gradients of {unit.name} in fp32, 2 bytes per parameter for which offload's "
            "accumulate= leaves room,",
        )
        if on_device:
            return unit.memory.device.device_buffer(size)
        # Of a root parameter each replica has its own gradient, as it has of everything that is on its device.
        memory = None if unit.is_root else unit.replicas.memory(size)
        return unit.memory.device.host_buffer(size, pinned=False, private=True, memory=memory)

    def _sum_in(self, buffer: Buffer, index: int) -> Tensor:
        return buffer.view(self._low.offsets[self.indices.index(index)], self._unit.shapes[index], torch.int16)
