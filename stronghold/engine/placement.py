"""Decides where every parameter of a model goes, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.device import Device, DeviceBuffer
from stronghold.engine.budget import BUFFERS, check_host, choose_disk, choose_window, keep_resident, model_bytes
from stronghold.engine.model_units import ModelUnits, units_of
from stronghold.layout import ALIGNMENT_BYTES, PAGE_BYTES
from stronghold.planner.step_bytes import device_bytes
from stronghold.settings import OffloadSettings, kept_layers
from stronghold.unit import ONE_REPLICA, Replicas, Unit, check_packed, part_of


@dataclass(frozen=True, kw_only=True)
class Placement(ModelUnits):
    """Where the parameters of a model go: units that are marked with what stays on the device and what is on disk.

    ``root_bytes`` is what buffers take on the device, and those root parameters that are not resident.
    """

    root_bytes: int
    window: int

    def move_root(self, device: Device) -> None:
        """Moves root parameters that have a device copy, and all buffers, to the device, once units are placed."""
        for unit in (unit for unit, _ in self.root if unit.has_device_copy):
            copy_to_device(unit, device)
        for module, name in self.buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = buffer.to(device.torch_device)


def copy_to_device(unit: Unit, device: Device) -> None:
    """Makes the device copy of root parameters on the host, which the parameters are from then on."""
    # Not through .to(): on a device that plays one on the CPU that would be the host's own tensor.
    copy = unit.device_copy = DeviceBuffer(device.buffer_to_look_at(unit.layout.total_bytes))
    with torch._C.DisableTorchFunctionSubclass():
        for index, (parameter, weight) in enumerate(zip(unit.parameters, unit.weight, strict=True)):
            there = copy.view(unit.layout.offsets[index], weight.shape, weight.dtype)
            there.copy_(weight)
            parameter.data = there
            unit.on_device.append(there)
            unit.versions[index] = parameter._version


def plan(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    settings: OffloadSettings,
    device: Device,
    replicas: Replicas = ONE_REPLICA,
    root_on_host: Iterable[nn.Parameter] = (),
) -> Placement:
    """Places the parameters of ``model`` and chooses the window; changes nothing.

    ``replicas`` are the processes that have all of it in common, and root parameters ``root_on_host`` have their states
    there. Raises ValueError and BudgetError.
    """
    check_packed(model, device.torch_device, dtype)
    alignment = ALIGNMENT_BYTES if not settings.directories else PAGE_BYTES
    of = units_of(model, layers, dtype, alignment, apart=not device.is_host, in_pieces=settings.micro_batch is not None)
    for unit in of.units:
        unit.replicas = replicas
    ids = {id(parameter) for parameter in root_on_host}
    root = [unit for unit, _ in of.root]
    on_host = {unit for unit in root if id(unit.parameters[0]) in ids}
    sizes = model_bytes(of.layers, root, of.buffer_bytes, is_host=device.is_host, accumulates=settings.accumulates)
    resident = keep_resident(of.layers, root, on_host, sizes, settings, device)
    window = choose_window(of.layers, sizes, resident, settings, device)
    _refuse_kept(of.layers[len(of.layers) - kept_layers(settings.activations, len(of.layers)) :], settings.activations)
    if settings.directories:
        choose_disk(
            of.units, {unit: number for number, unit in enumerate([*of.layers, *root])}, sizes, resident, settings
        )
    check_host(of.units, settings, device)
    return Placement(**vars(of), root_bytes=device_bytes(sizes, window, resident, BUFFERS)[2], window=window)


def _refuse_kept(layers: Iterable[Unit], activations: int | str) -> None:
    for unit in layers:
        parts = [part for parameter in unit.parameters if (part := part_of(parameter)) is not None]
        if not unit.resident and not all(part.may_be_kept for part in parts):
            raise ValueError(
                f"activations={activations!r} would hold, unpacked, all weights that are computed with (got weights "
                f"{parts[0].title} in {unit.name}); use activations='recompute' or 'host', or keep all layers resident"
            )
