"""``report(model)``: what an offloaded model takes, and where its last step's time went."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from stronghold.engine.first_pass import awaits_inputs
from stronghold.engine.offload import known_engine
from stronghold.engine.split_experts import experts_per_part_of
from stronghold.optim import HostMuon
from stronghold.optim.held import name_of
from stronghold.reports import Report
from stronghold.unit import Unit, count_of, part_of


def report(model: nn.Module) -> Report:
    """Tells what an offloaded model takes of each memory, and where its last step's time went.

    Raises OffloadedModelError for a model that is not offloaded.
    """
    engine = known_engine(model)
    optimizer: Any = engine.own_optimizer
    unit, device = engine.layers[0], engine.device
    shelf = engine.activations.shelf if engine.activations is not None else None
    parameters = [p for h in engine.units for p in h.parameters]
    ran = [block.compiled.ran for block in engine.blocks if block.compiled is not None]
    others_host_bytes, others_device_bytes = engine.held.other_optimizers_bytes()
    return Report(
        parameters=sum(map(count_of, parameters)),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        layers=len(engine.layers),
        window=engine.window.size,
        resident=sum(h.resident for h in engine.layers),
        resident_root=sum(len(h.parameters) for h in engine.units if h.is_root and h.resident),
        device=device.name,
        dtype=_dtype_of(unit),
        states=optimizer.states if optimizer is not None else None,
        other_optimizers=tuple(sorted(map(name_of, engine.held.other_optimizers))),
        others_host_bytes=others_host_bytes,
        others_device_bytes=others_device_bytes,
        slots_device_bytes=engine.held.slots_bytes(),
        gradients_device_bytes=engine.held.gradient_slots_bytes(),
        root_device_bytes=engine.held.root_bytes,
        resident_device_bytes=engine.held.resident_bytes(),
        root_gradients_device_bytes=engine.held.root_gradient_bytes(),
        update_device_bytes=optimizer.scratch_bytes() if optimizer is not None else 0,
        peak_device_bytes=device.peak_bytes(),
        pinned_host_bytes=device.pinned_bytes,
        pageable_host_bytes=device.pageable_bytes,
        process_host_bytes=engine.held.process_bytes,
        beside_host_bytes=engine.held.beside_bytes(),
        inputs_host_bytes=shelf.host_bytes if shelf is not None else 0,
        inputs_to_come_bytes=engine.budget.for_inputs,
        inputs_disk_bytes=shelf.disk_bytes if shelf is not None else 0,
        disk_bytes=engine.store.disk_bytes,
        disk_paths=tuple(map(str, engine.store.paths)),
        on_root_disk=any(path.stat().st_dev == os.stat("/").st_dev for path in engine.store.paths),
        accumulation_bytes=sum(
            h.gradients.sum_bytes() // (1 if h.is_root else h.replicas.local_world_size) for h in engine.units
        ),
        skipped_steps=optimizer.skipped_steps if optimizer is not None else 0,
        step=engine.stopwatch.last(),
        weights_on_disk=sum(unit.lives("weights") == "disk" for unit in engine.layers),
        planned=engine.planned.of(
            in_backward=optimizer is not None and optimizer.in_backward, by_muon=isinstance(optimizer, HostMuon)
        ),
        stages=getattr(model, "stage_times", tuple)(),  # a model in stages tells of them
        states_on_disk=sum(unit.trainable and unit.lives("moments") == "disk" for unit in engine.layers),
        compiled=ran.count(True),
        not_compiled=ran.count(False),
        experts_per_part=experts_per_part_of(model),
        awaits_inputs=awaits_inputs(engine),
    )


def _dtype_of(unit: Unit) -> str:
    """Returns what a layer computes in, and that its weights are packed, if they are."""
    own = [dtype for dtype, p in zip(unit.dtypes, unit.parameters, strict=True) if part_of(p) is None]
    names = " and ".join(
        str(dtype).removeprefix("torch.") for dtype in dict.fromkeys([*([unit.dtype] * bool(own)), *own])
    )
    titles = dict.fromkeys(part.title for p in unit.parameters if (part := part_of(p)) is not None)
    packed = f"weights {' and '.join(titles)}" if titles else ""
    return ", ".join(filter(None, (names, packed)))
