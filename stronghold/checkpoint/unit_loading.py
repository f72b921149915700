"""Puts what a checkpoint has of a unit, and of the buffers, where a model has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stronghold.checkpoint.links import remember
from stronghold.checkpoint.unit_tensors import tensors_of
from stronghold.engine import Engine
from stronghold.engine.adamw import AdamW
from stronghold.errors import CheckpointError
from stronghold.formats.built_buffers import BuiltBuffers, tell_of
from stronghold.formats.manifest import FileEntry, name_of
from stronghold.formats.moments import wrong_moment
from stronghold.formats.reader import Checkpoint, UnitReader
from stronghold.native import BLOCK, Blocks
from stronghold.optim.blocks import decode
from stronghold.optim.states import ParameterState, moments_of
from stronghold.split import join
from stronghold.unit import Unit

if TYPE_CHECKING:
    from stronghold.formats.dcp import DistributedCheckpoint, DistributedTensors

_PART = 2**20
"""Elements of an 8-bit moment that are decoded at a time."""
assert _PART % BLOCK == 0


def load_unit(
    checkpoint: Checkpoint | DistributedCheckpoint, engine: Engine, optimizer: AdamW, unit: Unit, names: list[str]
) -> None:
    manifest = checkpoint.manifest
    engine.store.mark_dirty(unit)
    with checkpoint.unit(names) as reader:
        for index, (name, parameter) in enumerate(zip(names, unit.parameters, strict=True)):
            _load_master(reader, unit, index, name)
            engine.store.drop(unit)
            if manifest.parameters[name].step is not None:
                _load_moments(reader, optimizer.state[parameter], name)
                engine.store.drop(unit)
    for target, weight in zip(unit.on_device, unit.weight, strict=False):
        target.copy_(weight)
    unit.rewritten()
    unit.supersede()
    entry = manifest.files[reader.files[0]] if len(reader.files) == 1 else None
    tensors = tensors_of(unit, names, optimizer.state)
    form = {name: (name_of(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    if isinstance(entry, FileEntry) and form == {name: (e.dtype, e.shape) for name, e in entry.tensors.items()}:
        remember(unit, optimizer, manifest.directory / reader.files[0], entry)


def _load_master(file: UnitReader | DistributedTensors, unit: Unit, index: int, name: str) -> None:
    weight, low = unit.weight[index], f"{name}/remainder"
    if unit.dtypes[index] == torch.float32:
        if file.dtype(name) == torch.float32:
            file.read_to(name, weight)
        else:
            weight.copy_(join(file.read(name), file.read(low)) if low in file else file.read(name))
        return
    if file.dtype(name) == torch.float32:
        value = file.read(name).to(weight.device)
        if index in unit.masters.remainders or not torch.equal(value.to(weight.dtype).float(), value):
            unit.remainder(index)
            unit.masters.fill(index, weight, value)
        else:
            weight.copy_(value)
        return
    file.read_to(name, weight)
    if low in file:
        remainder = unit.remainder(index)
        assert remainder is not None
        file.read_to(low, remainder)
    elif index in unit.masters.remainders:
        unit.masters.remainders[index].zero_()


def _load_moments(file: UnitReader | DistributedTensors, state: ParameterState, name: str) -> None:
    for key in moments_of(state):
        moment, codes = state[key], f"{name}/{key}"
        exponents = f"{codes}/exponents"
        if isinstance(moment, Blocks):
            file.read_to(codes, moment.codes)
            file.read_to(exponents, moment.exponents)
            _check(name, key, moment.exponents)
        elif exponents in file:
            scales = file.read(exponents)
            _check(name, key, scales)
            _decode(file.read(codes), scales, moment.view(-1), signed=key == "exp_avg")
        else:
            file.read_to(codes, moment)
            _check(name, key, moment)


def _check(name: str, key: str, values: Tensor) -> None:
    if rule := wrong_moment(values, key):
        raise CheckpointError(f"{key} of {name} {rule}, and the optimizer would make weights of it")


def _decode(codes: Tensor, exponents: Tensor, moment: Tensor, *, signed: bool) -> None:
    for begin in range(0, codes.numel(), _PART):
        end = min(begin + _PART, codes.numel())
        part = Blocks(codes=codes[begin:end], exponents=exponents[begin // BLOCK : -(-end // BLOCK)])
        moment[begin:end].copy_(decode(part, signed=signed))


def check_buffers(checkpoint: Checkpoint | DistributedCheckpoint, model: nn.Module, built: BuiltBuffers) -> set[str]:
    """Returns the names of the saved buffers that ``model`` has otherwise by its own configuration, and keeps.

    Warns of them, and of those that become the checkpoint's where it cannot be known that they should.
    """
    found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for module, own, name, saved in _saved_buffers(checkpoint, model):
        found[built.takes(module, own, name, checkpoint.manifest.buffers[name], saved)].append(name)
    tell_of(found[False], found[None], checkpoint.manifest.directory)
    return set(found[False])


def load_buffers(checkpoint: Checkpoint | DistributedCheckpoint, model: nn.Module, own_ones: set[str]) -> None:
    """Gives the model the buffers that were saved, but for ``own_ones``."""
    for module, own, name, saved in _saved_buffers(checkpoint, model):
        present = module._buffers[own]
        if name in own_ones:
            continue
        if present is not None and present.shape == saved.shape and present.dtype == saved.dtype:
            present.copy_(saved)  # in place: others may hold it too
        else:
            module._buffers[own] = saved.to(present.device) if present is not None else saved


def _saved_buffers(
    checkpoint: Checkpoint | DistributedCheckpoint, model: nn.Module
) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yields the owner, the name there, the whole name and the saved value of those that are here and there."""
    if not checkpoint.manifest.buffers:
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    with checkpoint.buffers() as file:
        for name, entry in checkpoint.manifest.buffers.items():
            path, _, own = name.rpartition(".")
            module = modules.get(path)
            if module is None or own not in module._buffers:
                continue  # none that state_dict() has: those were compared
            yield module, own, name, file.read_buffer(name, entry)
