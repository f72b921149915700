"""Writes a checkpoint: unit by unit into a directory beside it, which takes its name when everything is on disk."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.file_writing import (
    buffers_of,
    check_extra,
    check_name,
    file_names,
    joined,
    manifest_of,
    settings_of,
    write_file,
)
from stronghold.checkpoint.in_place import save_in_place
from stronghold.checkpoint.links import link_unchanged, remember
from stronghold.checkpoint.unit_tensors import (
    Format,
    all_groups,
    check_format,
    engine_for,
    holds,
    names_of,
    step_of,
    tensors_of,
)
from stronghold.engine import Engine, uncompiled
from stronghold.engine.adamw import AdamW
from stronghold.engine.updates import check_complete
from stronghold.formats.manifest import BUFFERS, FileEntry, Manifest, ParameterEntry, read_manifest, write_manifest
from stronghold.formats.mounts import check_no_mount
from stronghold.formats.sync import sync_directory
from stronghold.unit import Unit, from_rank0


@torch.no_grad()
def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW,
    *,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    format: Format = "safetensors",
) -> Path:
    """Writes everything that a training needs to go on to the bit into ``directory``; returns its path.

    Call it between steps, after ``optimizer.step()``: gradients are not kept. What is kept is the fp32 masters exactly,
    AdamW's moments in their own format, its groups and counts, buffers, the state of ``scheduler``, the random states
    of torch (the CPU's and the model's device's), Python and numpy, and ``extra``.

    Everything goes into ``.NAME.partial`` beside ``directory``, is synced, and gets its name only then: a checkpoint is
    complete or not there. No more than one tensor is in memory beside the model. A unit that has not changed since the
    last checkpoint in the same parent directory is not written again: both have the same file (a hard link), which is
    why files of a checkpoint must never be written into.

    In the directory of the model's own store, the first of several, the checkpoint is one in place: what is on disk
    stays where it is, what is in memory is written beside it, and the directory outlives the run. The first change to
    what is there ends that, durably and beforehand. Of moments that the user writes by hand it only learns by their
    checksums.

    The processes of a model in stages all call it, and write one checkpoint together, each what it has; any number of
    processes loads it, one too.

    Args:
        directory: Where the checkpoint is to be: a new name, or the store's own directory.
        model: The offloaded model.
        optimizer: Its optimizer. Of several over one model, the checkpoint holds the states of this one alone, and the
            weights as all of them have updated them; ``save`` warns where another one has states.
        scheduler: One of ``torch.optim.lr_scheduler``, or what else has ``state_dict()``.
        extra: Numbers, texts, tensors and lists, tuples and dictionaries of them, such as the position in the data. Of
            several processes that train the model it must be the same in each.
        format: ``"safetensors"``, or ``"dcp"`` for one of ``torch.distributed.checkpoint``, which other programs load:
            under "model" and "optimizer" masters and moments in fp32, named as ``get_model_state_dict`` and
            ``get_optimizer_state_dict`` do, and the rest under "stronghold". It has no checksums, a unit that has not
            changed is written again, and 8-bit moments become fp32 ones.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: A ``directory`` that is in use or a mount point, something that cannot be kept, or another ``extra``
            in each process; nothing is written then.
        OffloadedModelError: A model that is not offloaded, another one's optimizer, or with ``update="in_backward"`` a
            backward pass that has updated layers and whose ``step()`` has not come.
        OSError: A disk that refuses, with the file's name; nothing is left behind then.
        StoreError: In place, where the user holds weights that are on disk; CorruptionError where these are damaged.
    """
    check_format(format)
    model = uncompiled(model)
    engine = engine_for(model, optimizer)
    _tell_of_others(engine, optimizer)
    processes, directory = engine.processes, Path(os.path.realpath(directory))  # a link stays one

    def own_rest() -> dict[str, Any]:
        check_complete(engine)
        return settings_of(optimizer, scheduler, extra)

    if holds(engine, directory) and format == "safetensors":
        return save_in_place(model, engine, optimizer, own_rest())
    partial = directory.with_name(f".{directory.name}.partial")
    rest = processes.run_on_all(own_rest)
    check_name(processes, directory)
    check_extra(processes, rest["extra"])
    groups = all_groups(processes, optimizer, names_of(model))
    from_rank0(processes, lambda: _check_new(directory))
    engine.close_backward()
    try:
        from_rank0(processes, lambda: _begin(partial))
        if format == "dcp":
            from stronghold.checkpoint.dcp_saving import own_content, write_distributed  # which takes a while to import

            content = processes.run_on_all(lambda: own_content(partial, model, engine, optimizer, groups, rest))
            manifests = processes.all_gather_object(content.manifest)
            write_distributed(content, joined(manifests), processes)
            from_rank0(processes, lambda: sync_directory(partial))
            from_rank0(processes, lambda: _name(partial, directory))
            return directory
        manifest, written = processes.run_on_all(lambda: _write(partial, model, engine, optimizer, groups, rest))
        parts = processes.all_gather_object((manifest, buffers_of(model)))
        from_rank0(processes, lambda: _finish(parts, directory))
    except BaseException:
        if processes.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for unit, (name, entry) in written.items():
        remember(unit, optimizer, directory / name, entry)
    return directory


def _tell_of_others(engine: Engine, optimizer: AdamW) -> None:
    if engine.optimizers.others_have_states(optimizer):
        warnings.warn(
            "a checkpoint holds the states of the optimizer that it is saved with, and no others' (got one of several "
            "over this model that have been used), so that a training would go on from it with new states for the "
            "others; give one optimizer several groups of parameters, or keep the state_dict() of each other one "
            "beside the checkpoint and load it behind checkpoint.load",
            RuntimeWarning,
            stacklevel=4,
        )


def _check_new(directory: Path) -> None:
    check_no_mount(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"a checkpoint's directory must be new (got {str(directory)!r}); pass another, or remove it")


def _begin(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
    _make(partial.parent)
    partial.mkdir()


def _finish(parts: list[tuple[Manifest, dict[str, Tensor]]], directory: Path) -> None:
    """Joins what the processes have written, and gives it its name."""
    manifest = joined([manifest for manifest, _ in parts])
    buffers = {name: buffer for _, some in reversed(parts) for name, buffer in some.items()}
    if buffers:
        entry = write_file(manifest.directory / BUFFERS, "the buffers", buffers)
        manifest = replace(manifest, files={**manifest.files, BUFFERS: entry})
    write_manifest(manifest)
    read_manifest(manifest.directory)  # what load would refuse gets no name
    _name(manifest.directory, directory)


def _name(partial: Path, directory: Path) -> None:
    """Gives what is on disk its name."""
    partial.rename(directory)
    sync_directory(directory.parent)


def _make(directory: Path) -> None:
    """Makes a directory that stays, with its parents."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


def _write(
    directory: Path,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    groups: list[list[str]],
    rest: dict[str, Any],
) -> tuple[Manifest, dict[Unit, tuple[str, FileEntry]]]:
    names, states = names_of(model), optimizer.state  # which waits for the updates under way
    files: dict[str, FileEntry] = {}
    parameters: dict[str, ParameterEntry] = {}
    written: dict[Unit, tuple[str, FileEntry]] = {}
    for unit, file in file_names(engine).items():
        if all(id(parameter) in engine.copies for parameter in unit.parameters):
            continue
        engine.take_writes(unit)
        tensors = tensors_of(unit, names[unit], states)
        entry = link_unchanged(unit, optimizer, tensors, directory / file)
        if entry is None:
            entry = write_file(directory / file, unit.name, tensors, lambda unit=unit: engine.store.drop(unit))
        files[file] = entry
        written[unit] = file, entry
        for name, parameter in zip(names[unit], unit.parameters, strict=True):
            step = step_of(parameter, states)
            parameters[name] = ParameterEntry(shape=list(parameter.shape), file=file, step=step)
    return manifest_of(directory, model, engine, optimizer, groups, files, parameters, rest), written
