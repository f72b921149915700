"""Loads a checkpoint into a model, however that is placed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.in_place import check_in_place, load_in_place
from stronghold.checkpoint.plain import from_plain
from stronghold.checkpoint.random_states import check_random_states, put_random_states
from stronghold.checkpoint.unit_loading import check_buffers, load_buffers, load_unit
from stronghold.checkpoint.unit_tensors import (
    Format,
    Names,
    all_groups,
    check_format,
    engine_for,
    holds,
    names_of,
    persistent_buffers,
)
from stronghold.engine import Engine, uncompiled
from stronghold.engine.adamw import AdamW
from stronghold.engine.updates import wait_on_host
from stronghold.errors import CheckpointError
from stronghold.formats.lock import locked_to_read
from stronghold.formats.manifest import Manifest, UnitFileEntry, name_of
from stronghold.formats.reader import Checkpoint
from stronghold.formats.reader import verify as verify_files
from stronghold.optim.groups import check_saved_step, is_number
from stronghold.optim.muon_groups import check_saved, is_muon
from stronghold.unit import ProcessGroup

if TYPE_CHECKING:
    from stronghold.formats.dcp import DistributedCheckpoint


@torch.no_grad()
def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW,
    *,
    scheduler: Any = None,
    verify: bool = True,
    format: Format = "safetensors",
) -> Any:
    """Puts ``model``, ``optimizer``, ``scheduler`` and the random states where :func:`save` found them.

    The model must have the same parameters, by name and shape, and the
    optimizer the same groups; window, store, resident layers, device, threads and the way of updating may be others.
    So may the formats where nothing is lost: the fp32 masters are exact whether saved or loaded with fp32 or bf16
    compute, and 8-bit moments go into fp32 exactly. fp32 moments do not go into eight bits, which is refused. Memory
    is bounded by one tensor beside the model. Gradients are left as they are, and so is a scheduler that is not passed.

    Buffers that no ``state_dict()`` has, such as RoPE's frequencies, are restored where the model was built with the
    same as the one that was saved: training may have changed them. Those that this model's own configuration computes
    otherwise, with another ``rope_theta``, say, stay its own, as with ``load_state_dict``; those that training has
    changed, too, become the checkpoint's. A RuntimeWarning names both.

    In the directory of the model's own store, reopened or saved in place and not changed since, what is on disk was
    verified and stays where it is, and only what belongs in memory is read. A directory that another run has open is
    not read, for that may change it.

    Args:
        directory: The checkpoint.
        model: An offloaded model with its parameters.
        optimizer: Its optimizer, with the same groups. Other optimizers of the model keep what states they have.
        scheduler: What was saved as such.
        verify: Whether every byte is read and compared with its checksum before anything changes, and again when it is
            loaded; without it, only then, and a damaged file leaves the model half loaded, which the error says. So it
            is with moments that no update can have left, such as NaN.
        format: ``"dcp"`` for one of ``torch.distributed.checkpoint``: one that :func:`save` wrote so, or one that
            another program did, with the parameters' and moments' names under prefixes of any kind ("model." and
            "optimizer.state."). Of that one the settings of AdamW's groups, and of Muon's, are taken too, and the
            random states left as they are. It has no checksums, and a pickle in it is run: load what you trust.

    Returns:
        The ``extra`` that was saved, in every process; None for another program's checkpoint.

    Raises:
        CheckpointError: A checkpoint that is absent, incomplete or of another model.
        CorruptionError: Altered bytes.
        OffloadedModelError: As :class:`AdamW` raises it; so is BudgetError.
        StoreError: A directory that is in use, or to be loaded in place into a store that is placed otherwise.
    """
    check_format(format)
    model = uncompiled(model)
    engine = engine_for(model, optimizer)
    processes, directory = engine.processes, Path(os.path.abspath(directory))
    names = names_of(model)
    forms, groups = _joined(processes.all_gather_object(_forms(model, names))), all_groups(processes, optimizer, names)
    own = format == "safetensors" and holds(engine, directory)
    with nullcontext() if own else locked_to_read(directory):
        checkpoint = processes.run_on_all(lambda: _open(directory, format, forms, groups))
        _check_same(checkpoint.manifest, processes)
        _check_model(checkpoint.manifest, *forms, engine.kind)
        _check_settings(checkpoint.manifest)
        _check_optimizer(checkpoint.manifest, optimizer, [set(group) for group in groups])
        extra = from_plain(checkpoint.manifest.extra)
        _load(checkpoint, model, engine, optimizer, scheduler, names, verify=verify, own=own)
    return extra


def _open(directory: Path, format: Format, forms: Forms, groups: list[list[str]]) -> Checkpoint | DistributedCheckpoint:
    if format == "safetensors":
        return Checkpoint(directory)
    from stronghold.formats.dcp import DistributedCheckpoint  # which takes a while to import

    return DistributedCheckpoint(directory, *forms, groups)


def _check_same(manifest: Manifest, processes: ProcessGroup) -> None:
    """Raises CheckpointError unless all processes, each with a path of its own, have opened the same checkpoint."""
    content = zlib.crc32(repr((manifest.model, manifest.step, manifest.parameters, manifest.buffers)).encode())
    opened = processes.all_gather_object((str(manifest.directory), manifest.step, content))
    for rank, (path, step, its) in enumerate(opened):
        if its != opened[0][2]:
            raise CheckpointError(
                f"all processes that train a model load one checkpoint (got {opened[0][0]} of step {opened[0][1]:g} in "
                f"process 0 and {path} of step {step:g} in process {rank}); pass the same one in each"
            )


def _load(
    checkpoint: Checkpoint | DistributedCheckpoint,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    scheduler: Any,
    names: Names,
    *,
    verify: bool,
    own: bool,
) -> None:
    """Loads a checkpoint; ``own`` says whether it is one in the place of the model's own store."""
    manifest, processes = checkpoint.manifest, engine.processes
    if scheduler is not None and manifest.scheduler is None:
        raise CheckpointError(
            f"the checkpoint has no scheduler's state (got scheduler={type(scheduler).__name__} for "
            f"{manifest.directory}); leave it out"
        )
    state = from_plain(manifest.scheduler)
    everyones = [from_plain(states) for states in manifest.random.get("processes", [manifest.random])]
    for states in everyones:
        check_random_states(states, engine.device.torch_device)
    if verify:
        files = [f for f, e in manifest.files.items() if not (own and isinstance(e, UnitFileEntry))]
        processes.run_on_all(lambda: verify_files(manifest, files[processes.rank :: processes.world_size]))
        if not isinstance(checkpoint, Checkpoint):
            processes.run_on_all(lambda: checkpoint.check_moments(processes.rank, processes.world_size))
    kept = processes.run_on_all(lambda: check_buffers(checkpoint, model, engine.built))
    with nullcontext() if scheduler is None else _scheduled(scheduler, state, manifest.directory):
        processes.run_on_all(lambda: _put(checkpoint, model, engine, optimizer, names, kept, own))
    _put_settings(optimizer, manifest)
    if not everyones:
        return
    there = processes.rank < len(everyones)  # when it was saved
    own_states = everyones[processes.rank if there else 0]
    put_random_states(own_states, engine.device.torch_device)
    if not there and engine.replicas.rank:
        torch.manual_seed(torch.initial_seed() + engine.replicas.rank)  # replicas draw apart


@contextmanager
def _scheduled(scheduler: Any, state: Any, directory: Path) -> Iterator[None]:
    """Loads the scheduler's state, and puts it back where the block, or the state itself, fails."""
    before = scheduler.state_dict()
    try:
        foreign = [key for key in state if key not in before and hasattr(scheduler, key)]
        if foreign:
            raise ValueError(f"{foreign[0]!r} is no part of its state")
        scheduler.load_state_dict(state)
    except Exception as error:  # each scheduler refuses in its own way
        scheduler.load_state_dict(before)
        raise CheckpointError(
            f"the scheduler must take the state that it was saved with (got a {type(scheduler).__name__}, and "
            f"{type(error).__name__}: {error}, in {directory}); build the one that was saved"
        ) from error
    try:
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


def _put(
    checkpoint: Checkpoint | DistributedCheckpoint,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    names: Names,
    kept: set[str],
    own: bool,
) -> None:
    """Puts the units and buffers of this process where they belong, but for the buffers ``kept`` as they are."""
    manifest = checkpoint.manifest
    engine.close_backward()
    wait_on_host(engine)
    for unit in engine.units:
        engine.take_writes(unit)  # now, for what is found later would be taken for a write into what is loaded here
    steps: dict[Tensor, float] = {
        parameter: step
        for unit, named in names.items()
        for name, parameter in zip(named, unit.parameters, strict=True)
        if (step := manifest.parameters[name].step) is not None
    }
    optimizer.restart(steps, zeroed=not own)
    if own:
        check_in_place(manifest, engine, optimizer, names)
    try:
        if own:
            load_in_place(manifest, engine, optimizer, names)
        else:
            for unit in engine.units:
                load_unit(checkpoint, engine, optimizer, unit, names[unit])
        load_buffers(checkpoint, model, kept)
    except Exception as error:
        raise CheckpointError(
            f"{manifest.directory} could not be loaded to the end, and the model now holds parts of it; load another "
            f"checkpoint before anything else: {error}"
        ) from error
    finally:
        engine.changed(engine.units)


Forms = tuple[dict[str, list[int]], dict[str, list[Any]]]
"""The shape of each parameter; the dtype and shape of each buffer that ``state_dict()`` has."""


def _forms(model: nn.Module, names: Names) -> Forms:
    parameters = {
        name: list(parameter.shape)
        for unit, named in names.items()
        for name, parameter in zip(named, unit.parameters, strict=True)
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


def _check_settings(manifest: Manifest) -> None:
    """Holds a checkpoint, of either format, to the rules for a state dictionary."""
    try:
        for group in manifest.optimizer["groups"]:
            if group:  # none is known where a checkpoint of another program has no states of its parameters
                check_saved(from_plain(group))
        for name, entry in manifest.parameters.items():
            check_saved_step(0 if entry.step is None else entry.step, name)
    except ValueError as error:
        raise CheckpointError(
            f"a checkpoint must be of AdamW ({error}, in {manifest.directory}), or of Muon in groups with use_muon; "
            "another optimizer saved it, or it was altered"
        ) from None


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
    for number, (group, saved_group) in enumerate(
        zip(optimizer.param_groups, manifest.optimizer["groups"], strict=True)
    ):
        if is_muon(group) != is_muon(saved_group):
            by = ["Muon" if is_muon(one) else "AdamW" for one in (group, saved_group)]
            raise CheckpointError(
                f"a group must be updated by what it was saved with (got {by[0]} for group {number}, and {by[1]} in "
                f"{manifest.directory}); set its use_muon as it was"
            )
        for key, value in from_plain(saved_group).items():
            if isinstance(group.get(key), Tensor) and not is_number(value):
                raise CheckpointError(
                    f"{key} of a group must be a number where the optimizer has a tensor for it (got {value!r:.100} in "
                    f"{manifest.directory}); build the optimizer that was saved"
                )
    has_moments = any(entry.step is not None for entry in manifest.parameters.values())
    if has_moments and manifest.states == "fp32" and optimizer.states == "8bit":
        raise CheckpointError(
            f"moments in fp32 do not go into eight bits without loss (got states='8bit', and 'fp32' in "
            f"{manifest.directory}); build AdamW with states='fp32', or to round them, load the checkpoint so and hand "
            "its optimizer's state_dict() to the load_state_dict() of an AdamW with states='8bit'"
        )


def _put_settings(optimizer: AdamW, manifest: Manifest) -> None:
    groups = optimizer.groups_from([from_plain(saved) for saved in manifest.optimizer["groups"]])
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key == "lr" else value
    optimizer.skipped_steps = manifest.optimizer["skipped_steps"]
