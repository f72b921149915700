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

    def update_now(self, home: Home, gradients: dict[int, Tensor], ready: Event) -> Event:
        """Submits the update of ``home`` behind ``ready``; returns its event."""

    def wait(self) -> None:
        """Blocks until every update is complete."""


class Home:
    """The host's memory of one unit, and what is under way in it.

    ``index`` is the layer's number, or None for an edge. ``weight`` are views in the compute dtype: what is copied to
    the device and what the parameter is outside the window. ``master`` are the fp32 views that the optimizer updates;
    with fp32 compute they are the same memory. All buffers share one layout up to their item size.
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
        self.master: list[Tensor] = []
        self.gradient: list[Tensor] = []
        self.gradient_buffer: HostBuffer | None = None
        self._keep: list[HostBuffer] = []
        self.updated: Event | None = None
        """Happens when the update under way is complete; None where none is."""
        self.touched = False
        """Somebody may have written the host's weights by a way that leaves no trace in the version."""
        self.versions = [0] * len(self.parameters)

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
        """Allocates the host's weights (and the fp32 master, where compute is not fp32) and fills them."""
        masters = [p.detach().to("cpu", torch.float32) for p in self.parameters]
        self.buffer = device.host_buffer(self.layout.total_bytes)
        self.weight = self._views(self.buffer, self.layout, self.dtype)
        if self.dtype == torch.float32:
            self.master = self.weight
        else:
            layout = lay_out([4 * p.numel() for p in self.parameters])
            buffer = device.host_buffer(layout.total_bytes, pinned=False)
            self._keep.append(buffer)
            self.master = self._views(buffer, layout, torch.float32)
        for view, master, value in zip(self.weight, self.master, masters, strict=True):
            master.copy_(value)
            if view is not master:
                view.copy_(value)

    def place_gradients(self, device: Device) -> None:
        """Allocates the host's gradients, in the compute dtype, if there are none yet."""
        if self.gradient_buffer is None:
            self.gradient_buffer = device.host_buffer(self.layout.total_bytes)
            self.gradient = self._views(self.gradient_buffer, self.layout, self.dtype)

    def _views(self, buffer: HostBuffer, layout: Layout, dtype: torch.dtype) -> list[Tensor]:
        return [buffer.view(o, s, dtype) for o, s in zip(layout.offsets, self.shapes, strict=True)]

    def wait_updated(self) -> None:
        """Blocks until no update of this unit is under way."""
        if self.updated is not None:
            assert self.owner is not None
            self.owner.wait_updated(self)

    def was_written(self) -> bool:
        """Whether somebody may have written the parameters since this was last asked."""
        versions = [raw_version(p) for p in self.parameters]
        written = self.touched or versions != self.versions
        self.touched, self.versions = False, versions
        return written

    def take_writes(self) -> None:
        """Brings the fp32 master up to what the user wrote into the host's weights.

        A weight that is no longer its master's rounding was written by the user, and its master takes the value;
        where it still is, the master keeps its low bits.
        """
        for weight, master in zip(self.weight, self.master, strict=True):
            if weight is not master:
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


def raw_version(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


def raw_requires_grad(parameter: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad
