"""Where one unit of parameters lives on the host: a layer, or one parameter of the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stronghold.device import Device, Event, HostBuffer
from stronghold.errors import OffloadedModelError
from stronghold.layout import Layout, lay_out


class Owner(Protocol):
    """What an optimizer and a parameter may ask of the engine they belong to."""

    device: Device
    homes: Sequence[Home]

    def close_backward(self) -> None:
        """Brings down and publishes the gradients of a backward pass that was left unfinished."""

    def adopt(self, optimizer: Updater) -> None:
        """Makes ``optimizer`` the one that updates this model; raises where it has one already."""

    def gradients_on_host(self, home: Home, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Returns ``gradients`` (by place) as contiguous tensors in host memory, complete."""

    def take_writes(self, home: Home) -> bool:
        """Brings the host's memory of ``home`` up to what the user wrote into its parameters, if anything."""

    def update(self, home: Home, task: Callable[[], None], elements: int, after: Event | None) -> Event:
        """Submits ``task``, the update of ``elements`` parameters of ``home``, behind ``after``.

        Returns the event after which the weights may be used again.
        """

    def changed(self, homes: Sequence[Home]) -> None:
        """Hears that updates of ``homes`` are under way: what the device holds of them is stale."""

    def step_done(self) -> None:
        """Hears that the optimizer's step has been taken."""

    def wait_updated(self, home: Home) -> None:
        """Waits for the update of ``home`` that is under way: somebody uses its weights or gradients."""


class Updater(Protocol):
    """What the engine may ask of the optimizer."""

    in_backward: bool

    def updates(self, home: Home, place: int) -> bool:
        """Whether a parameter is one of those that the optimizer updates."""

    def update_now(self, home: Home, gradients: dict[int, Tensor], ready: Event) -> Event:
        """Submits the update of ``home`` behind ``ready``; returns its event."""

    def wait(self) -> None:
        """Blocks until every update is complete."""


class Home:
    """The host's memory of one unit, and what is under way in it.

    ``index`` is the layer's number, or None for an edge. ``weight`` are views in the compute dtype: what is copied to
    the device and what the parameter is outside the window. Gradients have a layout of their own, without those of
    frozen parameters. "Place" is a parameter's number in its unit.
    """

    def __init__(self, index: int | None, name: str, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self.dtype = dtype
        self.shapes = [tuple(p.shape) for p in parameters]
        self.layout: Layout = lay_out([p.numel() * dtype.itemsize for p in parameters])
        self.owner: Owner | None = None
        self.buffer: HostBuffer | None = None
        self.weight: list[Tensor] = []
        self.on_device: list[Tensor] = []
        """An edge's own memory on the device; a layer has none but its slot."""
        self._masters: dict[int, Tensor] = {}
        self._buffers: list[HostBuffer] = []
        self._device: Device | None = None
        self.gradient_places: tuple[int, ...] = ()
        self.gradient_layout: Layout = lay_out([])
        self.gradient_buffer: HostBuffer | None = None
        self.fit_gradients()
        self.updated: Event | None = None
        """Happens when the update under way is complete; None where none is."""
        self.touched = False
        """Somebody may have written the host's weights by a way that leaves no trace in the version."""
        self.versions = [0] * len(self.parameters)
        self.generation = 0
        """Counts what has changed the weights: updates, and writes that show in the versions."""

    @property
    def is_edge(self) -> bool:
        return self.index is None

    @property
    def trainable(self) -> bool:
        return any(raw_requires_grad(p) for p in self.parameters)

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def place(self, device: Device) -> None:
        """Allocates the host's weights, and the fp32 masters that training or exactness need, and fills them."""
        self._device = device
        values = [p.detach() for p in self.parameters]
        self.buffer = device.host_buffer(self.layout.total_bytes)
        self.weight = [
            self.buffer.view(offset, shape, self.dtype)
            for offset, shape in zip(self.layout.offsets, self.shapes, strict=True)
        ]
        for weight, value in zip(self.weight, values, strict=True):
            weight.copy_(value)
        self._place_masters(self.master_places(), values)

    def master_places(self) -> list[int]:
        """Returns which parameters have a master apart from their weight: those trained, or rounded when placed."""
        if self.dtype == torch.float32:
            return []
        parameters = enumerate(self.parameters)
        return [place for place, p in parameters if raw_requires_grad(p) or p.dtype != self.dtype]

    def master(self, place: int) -> Tensor:
        """Returns the fp32 master of a parameter, which the optimizer updates; with fp32 compute the weight itself."""
        if self.dtype == torch.float32:
            return self.weight[place]
        if place not in self._masters:  # frozen until now, and its weight exact
            self._place_masters([place], self.weight)
        return self._masters[place]

    def fit_gradients(self) -> bool:
        """Makes room in the gradients' layout for the parameters that are trained now; returns whether it changed."""
        trained = {place for place, p in enumerate(self.parameters) if raw_requires_grad(p)}
        if trained <= set(self.gradient_places):
            return False
        self.gradient_places = tuple(sorted(trained.union(self.gradient_places)))
        self.gradient_layout = lay_out([self.layout.sizes[place] for place in self.gradient_places])
        self.gradient_buffer = None
        return True

    def place_gradients(self, device: Device) -> HostBuffer:
        """Returns the host's gradients, in the compute dtype, allocated if there are none yet."""
        if self.gradient_buffer is None:
            self.gradient_buffer = device.host_buffer(self.gradient_layout.total_bytes)
        return self.gradient_buffer

    def gradient_in(self, buffer: HostBuffer, place: int) -> Tensor:
        """Returns the gradient of one parameter in a host buffer of the gradients' layout."""
        offset = self.gradient_layout.offsets[self.gradient_places.index(place)]
        return buffer.view(offset, self.shapes[place], self.dtype)

    def _place_masters(self, places: Sequence[int], values: Sequence[Tensor]) -> None:
        assert self._device is not None
        layout = lay_out([4 * self.parameters[place].numel() for place in places])
        if not places:
            return
        buffer = self._device.host_buffer(layout.total_bytes, pinned=False)
        self._buffers.append(buffer)
        for place, offset in zip(places, layout.offsets, strict=True):
            self._masters[place] = buffer.view(offset, self.shapes[place], torch.float32)
            self._masters[place].copy_(values[place])

    def wait_updated(self) -> None:
        """Blocks until no update of this unit is under way."""
        if self.updated is not None:
            assert self.owner is not None
            self.owner.wait_updated(self)

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds a tensor over a parameter's memory, such as ``p.data``, and may write through it."""
        return any(is_shared(tensor) for tensor in (self.on_device or self.weight))

    def versions_now(self) -> list[int]:
        return [raw_version(p) for p in self.parameters]

    def was_written(self) -> bool:
        """Whether somebody may have written the parameters since this was last asked."""
        versions = self.versions_now()
        if versions != self.versions:
            self.generation += 1
        written = self.touched or self.is_lent or versions != self.versions
        self.touched, self.versions = False, versions
        return written

    def take_writes(self) -> None:
        """Brings the fp32 master up to what the user wrote into the host's weights.

        A weight that is no longer its master's rounding was written by the user, and its master takes the value;
        where it still is, the master keeps its low bits.
        """
        for place, master in self._masters.items():
            weight = self.weight[place]
            torch.where(weight == master.to(weight.dtype), master, weight.float(), out=master)

    def check_unchanged(self, owners: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
        """Raises where one of the modules that use a parameter no longer holds it by its name."""
        for module, name, parameter in owners:
            if module._parameters.get(name) is not parameter:
                raise OffloadedModelError(
                    f"parameter {name!r} of {self.name} ({type(module).__name__}) was replaced after offload(), so the "
                    "engine would compute with the old one; write into the parameter (p.data.copy_(...)), or replace "
                    "it before calling offload()"
                )


def is_shared(tensor: Tensor) -> bool:
    """Whether the memory of a tensor that has one twin (a parameter, or a detached gradient) is used by a third."""
    return _users(tensor) > _users(_ALONE) + 1


def _users(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = torch.empty(1)


def raw_version(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


def raw_requires_grad(parameter: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad
