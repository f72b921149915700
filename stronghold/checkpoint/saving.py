"""Writes a checkpoint: unit by unit into a directory beside it, which takes its name when everything is on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.links import link_unchanged, remember
from stronghold.checkpoint.manifest import (
    BufferEntry,
    FileEntry,
    Manifest,
    ParameterEntry,
    TensorEntry,
    write_manifest,
)
from stronghold.checkpoint.plain import to_plain
from stronghold.checkpoint.random_states import take_random_states
from stronghold.checkpoint.units import (
    engine_for,
    group_names,
    name_of,
    names_of,
    persistent_buffers,
    step_of,
    tensors_of,
)
from stronghold.home import Home
from stronghold.native import crc32c
from stronghold.offload import Engine
from stronghold.optim import AdamW
from stronghold.tensor_files import DTYPES, TensorFileWriter

BUFFERS = "buffers.safetensors"


@torch.no_grad()
def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW,
    *,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes everything that a training needs to go on to the bit into ``directory``; returns its path.

    Call it between steps, after ``optimizer.step()``: gradients are not kept. What is kept is the fp32 masters exactly,
    AdamW's moments in their own format, its groups and counts, buffers, the state of ``scheduler``, the random states
    of torch (the CPU's and the model's device's), Python and numpy, and ``extra``: numbers, texts, tensors and lists,
    tuples and dictionaries of them, such as the position in the data.

    Everything goes into ``.NAME.partial`` beside ``directory``, is synced, and gets its name only then: a checkpoint is
    complete or not there. No more than one tensor is in memory beside the model. A unit that has not changed since the
    last checkpoint in the same parent directory is not written again: both have the same file (a hard link), which is
    why files of a checkpoint must never be written into.

    Raises ValueError where ``directory`` is in use or something cannot be kept, OffloadedModelError for a model that is
    not offloaded or another one's optimizer, and OSError, with the file's name, where the disk refuses; then nothing
    is left behind.
    """
    engine = engine_for(model, optimizer)
    directory = Path(os.path.abspath(directory))
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"a checkpoint's directory must be new (got {str(directory)!r}); pass another, or remove it")
    rest: dict[str, Any] = {
        "optimizer": _optimizer_settings(optimizer),
        "scheduler": None if scheduler is None else to_plain(scheduler.state_dict(), "scheduler"),
        "extra": to_plain(extra, "extra"),
    }
    engine.close_backward()
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
        _make(directory.parent)
        partial.mkdir()
        manifest, written = _write(partial, model, engine, optimizer, rest)
        write_manifest(manifest)
        sync_directory(partial)
        partial.rename(directory)
        sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for home, name in written.items():
        remember(home, optimizer, directory / name, manifest.files[name])
    return directory


def _make(directory: Path) -> None:
    """Makes a directory that stays, with its parents."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Blocks until the entries of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(
    directory: Path, model: nn.Module, engine: Engine, optimizer: AdamW, rest: dict[str, Any]
) -> tuple[Manifest, dict[Home, str]]:
    names, states = names_of(model), optimizer.state  # which waits for the updates under way
    files: dict[str, FileEntry] = {}
    parameters: dict[str, ParameterEntry] = {}
    written: dict[Home, str] = {}
    edges = 0
    for home in engine.homes:
        kind, number = ("edge", edges) if home.index is None else ("layer", home.index)
        edges += home.is_edge
        file = written[home] = f"{kind}-{number:05}.safetensors"
        engine.take_writes(home)
        tensors = tensors_of(home, names[home], states)
        entry = link_unchanged(home, optimizer, tensors, directory / file)
        if entry is None:
            entry = _write_file(directory / file, home.name, tensors, lambda home=home: engine.store.drop(home))
        files[file] = entry
        for name, parameter in zip(names[home], home.parameters, strict=True):
            step = step_of(parameter, states)
            parameters[name] = ParameterEntry(shape=list(parameter.shape), file=file, step=step)
    buffers, persistent = dict(model.named_buffers()), persistent_buffers(model)
    if buffers:
        files[BUFFERS] = _write_file(directory / BUFFERS, "the buffers", {n: _known(b) for n, b in buffers.items()})
    groups = group_names(optimizer, names)
    manifest = Manifest(
        directory=directory,
        model=type(model).__name__,
        step=max((entry.step for entry in parameters.values() if entry.step is not None), default=0.0),
        states=optimizer.states,
        files=files,
        parameters=parameters,
        buffers={
            name: BufferEntry(dtype=name_of(b.dtype), shape=list(b.shape), persistent=name in persistent)
            for name, b in buffers.items()
        },
        optimizer={**rest["optimizer"], "group_names": groups, "skipped_steps": optimizer.skipped_steps},
        scheduler=rest["scheduler"],
        random=to_plain(take_random_states(engine.device.torch_device)),
        extra=rest["extra"],
    )
    return manifest, written


def _write_file(path: Path, unit: str, tensors: Mapping[str, Tensor], written: Any = lambda: None) -> FileEntry:
    announced = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    entries = {}
    with TensorFileWriter(path, announced, {"format": "pt", "unit": unit}) as file:
        for name, tensor in tensors.items():
            crc = file.write(name, tensor)
            entries[name] = TensorEntry(dtype=name_of(tensor.dtype), shape=list(tensor.shape), crc32c=crc)
            written()
        length = file.length_bytes
    header_bytes, header_crc = _header(path)
    return FileEntry(
        unit=unit, length_bytes=length, header_bytes=header_bytes, header_crc32c=header_crc, tensors=entries
    )


def _header(path: Path) -> tuple[int, int]:
    """Returns how long a file's header is, with its length in front, and the CRC-32C of both."""
    with path.open("rb") as file:
        begin = file.read(8)
        data = begin + file.read(int.from_bytes(begin, "little"))
    return len(data), crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _known(buffer: Tensor) -> Tensor:
    """Returns what stands for a buffer in a file: its bytes, where safetensors does not know its dtype."""
    return buffer if buffer.dtype in DTYPES else buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _optimizer_settings(optimizer: AdamW) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "groups": [to_plain(group, f"the parameter group {number}") for number, group in enumerate(groups)],
        "max_grad_norm": optimizer.max_grad_norm,
        "update": "in_backward" if optimizer.in_backward else "deferred",
        "nonfinite": optimizer.nonfinite,
    }
