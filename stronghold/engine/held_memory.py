"""What an offloaded model holds of each memory, for its report and its budgets."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import psutil
from torch import nn
from torch.optim import Optimizer

from stronghold.device import Device, resident_host_bytes
from stronghold.optim.held import held_bytes
from stronghold.unit import Unit
from stronghold.window import Gradients, Window


class HeldMemory:
    """Counts it. Made while ``model`` still has parameters of its own, which do not count as the process's."""

    def __init__(self, model: nn.Module, device: Device, units: Sequence[Unit], root_bytes: int) -> None:
        own = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_cpu)
        self.process_bytes = max(0, psutil.Process().memory_info().rss - own)
        """What the process held before."""
        self._anonymous_bytes = max(0, resident_host_bytes() - own)
        self.other_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those of other kinds than ours that have stepped parameters of this model."""
        self.root_bytes = root_bytes
        self._device, self._units = device, units
        self._window: Window | None = None
        self._gradients: Gradients | None = None

    def on_device(self, window: Window, gradients: Gradients) -> None:
        """Called when the slots are there."""
        self._window, self._gradients = window, gradients

    def held_bytes(self) -> tuple[int, int]:
        """Returns what is held (on the host, on the device), other optimizers' states included."""
        others_host, others_device = self.other_optimizers_bytes()
        counted = self._device.pinned_bytes + self._device.pageable_bytes
        return counted + others_host, self.device_bytes() + others_device

    def other_optimizers_bytes(self) -> tuple[int, int]:
        """Returns what the states of other optimizers than ours take (on the host, on the device)."""
        held = [held_bytes(optimizer) for optimizer in self.other_optimizers]
        return sum(host for host, _ in held), sum(device for _, device in held)

    def slots_bytes(self) -> int:
        """Returns what the window's slots take on the device."""
        return 0 if self._window is None else sum(slot.flat.numel() for slot in self._window.slots)

    def gradient_slots_bytes(self) -> int:
        """Returns what gradients on their way down take there."""
        return 0 if self._gradients is None else self._gradients.grad_offload.device_bytes

    def device_bytes(self) -> int:
        """Returns what is held on the device between steps."""
        return self.slots_bytes() + self.gradient_slots_bytes() + self.root_bytes + self.resident_bytes()

    def resident_bytes(self) -> int:
        """Returns what resident units hold on the device, their states included, and gradients that are kept."""
        newest = None if self._gradients is None else self._gradients.optimizer
        optimizer = None if newest is None else newest()
        given_up = optimizer is not None and optimizer.in_backward and not (self._gradients and self._gradients.summed)
        kept = (
            unit
            for unit in self._units
            if unit.resident and (unit.is_root or not given_up or unit.replicas.world_size > 1)
        )
        gradients = sum(unit.gradients.layout.total_bytes for unit in kept)
        return gradients + self._device.resident_bytes

    def allocated_bytes(self) -> int:
        """Returns what of that is allocated while there are no gradients, which autograd allocates itself."""
        copied = [unit for unit in self._units if unit.is_root and unit.trainable and not unit.resident]
        root = self.root_bytes - sum(unit.layout.total_bytes for unit in copied)
        return self.slots_bytes() + self.gradient_slots_bytes() + root + self._device.resident_bytes

    def root_gradient_bytes(self) -> int:
        """Returns what autograd holds of the root's gradients on the device, from ``backward()`` to ``zero_grad()``."""
        root = [unit for unit in self._units if unit.is_root]
        return sum(
            size
            for unit in root
            for size, parameter in zip(unit.layout.sizes, unit.parameters, strict=True)
            if parameter.requires_grad
        )

    def beside_bytes(self) -> int:
        """Returns what the process has taken of host memory by now beside what is counted."""
        counted, _ = self.held_bytes()
        counted += self.device_bytes() if self._device.is_host else 0
        return max(0, resident_host_bytes() - self._anonymous_bytes - counted)
