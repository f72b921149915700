"""Loads a checkpoint into a model, however that is placed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.in_place import check_in_place, load_in_place
from stronghold.checkpoint.links import remember
from stronghold.checkpoint.plain import from_plain
from stronghold.checkpoint.random_states import put_random_states
from stronghold.checkpoint.units import (
    MOMENTS,
    Names,
    all_groups,
    engine_for,
    holds,
    name_of,
    names_of,
    persistent_buffers,
    tensors_of,
)
from stronghold.checkpoint_files.lock import locked_to_read
from stronghold.checkpoint_files.manifest import BUFFERS, FileEntry, Manifest, UnitFileEntry, read_manifest
from stronghold.checkpoint_files.reader import FileReader, UnitReader
from stronghold.checkpoint_files.reader import verify as verify_files
from stronghold.errors import CheckpointError
from stronghold.home import Home
from stronghold.native import BLOCK, Blocks
from stronghold.offload import Engine
from stronghold.optim import AdamW
from stronghold.optim.blocks import decode
from stronghold.split import join

_PART = 2**20
"""Elements of an 8-bit moment that are decoded at a time."""
assert _PART % BLOCK == 0


@torch.no_grad()
def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW,
    *,
    scheduler: Any = None,
    verify: bool = True,
) -> Any:
    """Puts ``model``, ``optimizer``, ``scheduler`` and the random states where :func:`save` found them.

    Returns the ``extra`` that it was given. The model must have the same parameters, by name and shape, and the
    optimizer the same groups; window, store, resident layers, device, threads and the way of updating may be others.
    So may the formats where nothing is lost: the fp32 masters are exact whether saved or loaded with fp32 or bf16
    compute, and 8-bit moments go into fp32 exactly. fp32 moments do not go into eight bits, which is refused. Memory
    is bounded by one tensor beside the model. Gradients are left as they are, and so is a scheduler that is not passed.

    With ``verify`` every byte is read and compared with its checksum before anything changes, and again when it is
    loaded; without it, only then, and a damaged file leaves the model half loaded, which the error says.

    In the directory of the model's own store, reopened or saved in place and not changed since, what is on disk was
    verified and stays where it is, and only what belongs in memory is read. A directory that another run has open is
    not read, for that may change it.

    Raises CheckpointError for a checkpoint that is absent, incomplete or of another model, CorruptionError for altered
    bytes, OffloadedModelError and BudgetError as :class:`AdamW` does, and StoreError for a directory that is in use, or
    to be loaded in place into a store that is placed otherwise.
    """
    engine = engine_for(model, optimizer)
    directory = Path(os.path.abspath(directory))
    own = holds(engine, directory)
    with nullcontext() if own else locked_to_read(directory):
        manifest = engine.company.together(lambda: read_manifest(directory))
        _load(manifest, model, engine, optimizer, scheduler, verify=verify, own=own)
    return from_plain(manifest.extra)


def _load(
    manifest: Manifest,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    scheduler: Any,
    *,
    verify: bool,
    own: bool,
) -> None:
    """Loads a checkpoint; ``own`` says whether it is one in the place of the model's own store."""
    names, company = names_of(model), engine.company
    _check_model(manifest, *_joined(company.everyone(_forms(model, names))), engine.kind)
    _check_optimizer(manifest, optimizer, [set(group) for group in all_groups(company, optimizer, names)])
    if scheduler is not None and manifest.scheduler is None:
        raise CheckpointError(
            f"the checkpoint has no scheduler's state (got scheduler={type(scheduler).__name__} for "
            f"{manifest.directory}); leave it out"
        )
    if verify:
        files = [f for f, e in manifest.files.items() if not (own and isinstance(e, UnitFileEntry))]
        company.together(lambda: verify_files(manifest, files[company.rank :: company.count]))
    company.together(lambda: _put(manifest, model, engine, optimizer, names, own))
    _put_settings(optimizer, manifest)
    if scheduler is not None:
        scheduler.load_state_dict(from_plain(manifest.scheduler))
    states = manifest.random.get("processes", [manifest.random])  # one that was not there has the first one's
    own_states = states[company.rank] if company.rank < len(states) else states[0]
    put_random_states(from_plain(own_states), engine.device.torch_device)
    if company.rank >= len(states) and engine.replicas.index:
        torch.manual_seed(torch.initial_seed() + engine.replicas.index)  # replicas draw apart


def _put(manifest: Manifest, model: nn.Module, engine: Engine, optimizer: AdamW, names: Names, own: bool) -> None:
    """Puts the units and buffers of this process where they belong."""
    engine.close_backward()
    optimizer.wait()
    for home in engine.homes:
        engine.take_writes(home)  # now, for what is found later would be taken for a write into what is loaded here
    for slot in engine.window.slots:
        if slot.ready is not None:
            slot.ready.wait()  # a fetch under way reads what is about to be written
    engine.device.reads.record().wait()  # and so does one that is read ahead
    steps: dict[Tensor, float] = {
        parameter: step
        for home, named in names.items()
        for name, parameter in zip(named, home.parameters, strict=True)
        if (step := manifest.parameters[name].step) is not None
    }
    optimizer.restart(steps, zeroed=not own)
    if own:
        check_in_place(manifest, engine, optimizer, names)
    try:
        if own:
            load_in_place(manifest, engine, optimizer, names)
        else:
            for home in engine.homes:
                _load_unit(manifest, engine, optimizer, home, names[home])
        _load_buffers(manifest, model)
    except Exception as error:
        raise CheckpointError(
            f"{manifest.directory} could not be loaded to the end, and the model now holds parts of it; load another "
            f"checkpoint before anything else: {error}"
        ) from error
    finally:
        engine.changed(engine.homes)


Forms = tuple[dict[str, list[int]], dict[str, list[Any]]]
"""The shape of each parameter; the dtype and shape of each buffer that ``state_dict()`` has."""


def _forms(model: nn.Module, names: Names) -> Forms:
    parameters = {
        name: list(parameter.shape)
        for home, named in names.items()
        for name, parameter in zip(named, home.parameters, strict=True)
    }
    persistent, buffers = persistent_buffers(model), dict(model.named_buffers())
    return parameters, {n: [name_of(b.dtype), *b.shape] for n, b in buffers.items() if n in persistent}


def _joined(forms: list[Forms]) -> Forms:
    parameters, buffers = zip(*forms, strict=True)
    return (
        {name: form for some in parameters for name, form in some.items()},
        {name: form for some in buffers for name, form in some.items()},
    )


def _check_model(
    manifest: Manifest, wanted: dict[str, list[int]], wanted_buffers: dict[str, list[Any]], model: str
) -> None:
    saved = {name: entry.shape for name, entry in manifest.parameters.items()}
    saved_buffers = {n: [e.dtype, *e.shape] for n, e in manifest.buffers.items() if e.persistent}
    for what, here, there in (("parameter", wanted, saved), ("buffer", wanted_buffers, saved_buffers)):
        for name in [*there, *here]:
            if here.get(name) != there.get(name):  # type: ignore[attr-defined]
                got = [f"{side[name]}" if name in side else "none" for side in (there, here)]  # type: ignore[index]
                raise CheckpointError(
                    f"a checkpoint must be of the same model (first difference: {what} {name}, {got[0]} in "
                    f"{manifest.directory} and {got[1]} in this {model}); build the model that was "
                    f"saved, a {manifest.model}, or pass another checkpoint"
                )


def _check_optimizer(manifest: Manifest, optimizer: AdamW, here: list[set[str]]) -> None:
    saved = [set(group) for group in manifest.optimizer["group_names"]]
    if len(saved) != len(here):
        raise CheckpointError(
            f"the optimizer must have the groups it was saved with (got {len(here)} groups, {len(saved)} in "
            f"{manifest.directory}); build it with the same groups"
        )
    for number, (one, other) in enumerate(zip(saved, here, strict=True)):
        if one != other:
            name = min(one ^ other)
            raise CheckpointError(
                f"the optimizer must have the groups it was saved with (first difference: {name} is "
                f"{'only there' if name in one else 'only here'} in group {number}, there being "
                f"{manifest.directory}); build it with the same groups"
            )
    has_moments = any(entry.step is not None for entry in manifest.parameters.values())
    if has_moments and manifest.states == "fp32" and optimizer.states == "8bit":
        raise CheckpointError(
            f"moments in fp32 do not go into eight bits without loss (got states='8bit', and 'fp32' in "
            f"{manifest.directory}); build AdamW with states='fp32', or to round them, load the checkpoint so and hand "
            "its optimizer's state_dict() to the load_state_dict() of an AdamW with states='8bit'"
        )


def _load_unit(manifest: Manifest, engine: Engine, optimizer: AdamW, home: Home, names: list[str]) -> None:
    engine.store.opened(home)
    with UnitReader(manifest, names) as unit:
        for place, (name, parameter) in enumerate(zip(names, home.parameters, strict=True)):
            _load_master(unit, home, place, name)
            engine.store.drop(home)
            if manifest.parameters[name].step is not None:
                _load_moments(unit, optimizer.state[parameter], name)
                engine.store.drop(home)
    for target, weight in zip(home.on_device, home.weight, strict=False):
        target.copy_(weight)
    home.rewritten()
    home.generation += 1
    tensors = tensors_of(home, names, optimizer.state)
    file, *others = unit.files
    entry = manifest.files[file]
    form = {name: (name_of(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    if (
        not others
        and isinstance(entry, FileEntry)
        and form == {name: (e.dtype, e.shape) for name, e in entry.tensors.items()}
    ):
        remember(home, optimizer, manifest.directory / file, entry)


def _load_master(file: UnitReader, home: Home, place: int, name: str) -> None:
    weight, low = home.weight[place], f"{name}/remainder"
    if home.dtype == torch.float32:
        if file.dtype(name) == torch.float32:
            file.read_to(name, weight)
        else:
            weight.copy_(join(file.read(name), file.read(low)) if low in file else file.read(name))
        return
    if file.dtype(name) == torch.float32:
        value = file.read(name).to(weight.device)
        if place in home.masters.remainders or not torch.equal(value.to(weight.dtype).float(), value):
            home.remainder(place)
            home.masters.fill(place, weight, value)
        else:
            weight.copy_(value)
        return
    file.read_to(name, weight)
    if low in file:
        remainder = home.remainder(place)
        assert remainder is not None
        file.read_to(low, remainder)
    elif place in home.masters.remainders:
        home.masters.remainders[place].zero_()


def _load_moments(file: UnitReader, state: dict[str, Any], name: str) -> None:
    for key in MOMENTS:
        moment, codes = state[key], f"{name}/{key}"
        exponents = f"{codes}/exponents"
        if isinstance(moment, Blocks):
            file.read_to(codes, moment.codes)
            file.read_to(exponents, moment.exponents)
        elif exponents in file:
            _decode(file.read(codes), file.read(exponents), moment.view(-1), signed=key == "exp_avg")
        else:
            file.read_to(codes, moment)


def _decode(codes: Tensor, exponents: Tensor, moment: Tensor, *, signed: bool) -> None:
    for begin in range(0, codes.numel(), _PART):
        end = min(begin + _PART, codes.numel())
        part = Blocks(codes=codes[begin:end], exponents=exponents[begin // BLOCK : -(-end // BLOCK)])
        moment[begin:end].copy_(decode(part, signed=signed))


def _load_buffers(manifest: Manifest, model: nn.Module) -> None:
    if not manifest.buffers:
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    with FileReader(manifest, BUFFERS) as file:
        for name, entry in manifest.buffers.items():
            path, _, own = name.rpartition(".")
            module = modules.get(path)
            if module is None or own not in module._buffers:
                continue  # none that state_dict() has: those were compared
            saved = file.read_buffer(name, entry)
            present = module._buffers[own]
            if present is not None and present.shape == saved.shape and present.dtype == saved.dtype:
                present.copy_(saved)  # in place: others may hold it too
            else:
                module._buffers[own] = saved.to(present.device) if present is not None else saved


def _put_settings(optimizer: AdamW, manifest: Manifest) -> None:
    for group, saved in zip(optimizer.param_groups, manifest.optimizer["groups"], strict=True):
        for key, value in from_plain(saved).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key == "lr" else value
    optimizer.skipped_steps = manifest.optimizer["skipped_steps"]
