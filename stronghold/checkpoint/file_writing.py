"""Writes what a checkpoint is made of: files of tensors, and the manifest's account of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.plain import from_plain, to_plain
from stronghold.checkpoint.random_states import take_random_states
from stronghold.checkpoint.unit_tensors import persistent_buffers
from stronghold.engine import Engine
from stronghold.engine.adamw import AdamW
from stronghold.formats.manifest import (
    BUFFERS,
    BufferEntry,
    FileEntry,
    Manifest,
    ParameterEntry,
    TensorEntry,
    UnitFileEntry,
    name_of,
)
from stronghold.formats.tensor_files import DTYPES, TensorFileWriter
from stronghold.native import crc32c
from stronghold.unit import ProcessGroup, Unit


def file_names(engine: Engine) -> dict[Unit, str]:
    """Returns the name of each unit's file, in the safetensors format."""
    names, root = {}, 0
    whose = f"process-{engine.processes.rank}-" if engine.processes.world_size > 1 else ""
    for unit in engine.units:
        kind, number = ("root", root) if unit.layer is None else ("layer", unit.layer)
        root += unit.is_root
        names[unit] = f"{whose}{kind}-{number:05}.safetensors"
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns what stands for each buffer in a file, on the host."""
    return {name: known(buffer).detach().cpu() for name, buffer in model.named_buffers()}


def write_buffers(path: Path, model: nn.Module) -> dict[str, FileEntry]:
    """Writes the buffers, if there are any; returns the manifest's entry of their file."""
    buffers = buffers_of(model)
    return {BUFFERS: write_file(path, "the buffers", buffers)} if buffers else {}


def settings_of(optimizer: AdamW, scheduler: Any, extra: Any) -> dict[str, Any]:
    """Returns what of a manifest is the user's, plain. Raises ValueError for what cannot be kept."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "optimizer": {
            "groups": [to_plain(group, f"the parameter group {number}") for number, group in enumerate(groups)],
            "max_grad_norm": optimizer.max_grad_norm,
            "update": "in_backward" if optimizer.in_backward else "deferred",
            "nonfinite": optimizer.nonfinite,
        },
        "scheduler": None if scheduler is None else to_plain(scheduler.state_dict(), "scheduler"),
        "extra": to_plain(extra, "extra"),
    }


def manifest_of(
    directory: Path,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    groups: list[list[str]],
    files: Mapping[str, FileEntry | UnitFileEntry],
    parameters: dict[str, ParameterEntry],
    rest: dict[str, Any],
) -> Manifest:
    """Returns the manifest of a checkpoint with ``files``, of a model in several processes this one's part.

    ``groups`` are the names of the parameters in each of the optimizer's groups, in all processes; ``rest`` is what
    :func:`settings_of` returned.
    """
    persistent, modules = persistent_buffers(model), dict(model.named_modules(remove_duplicate=False))

    def entry_of(name: str, buffer: Tensor) -> BufferEntry:
        path, _, own = name.rpartition(".")
        built = engine.built.of(modules[path], own) if path in modules else None
        shape = list(buffer.shape)
        return BufferEntry(dtype=name_of(buffer.dtype), shape=shape, persistent=name in persistent, built=built)

    return Manifest(
        directory=directory,
        model=engine.kind,
        step=max((entry.step for entry in parameters.values() if entry.step is not None), default=0.0),
        states=optimizer.states,
        files=files,
        parameters=parameters,
        buffers={name: entry_of(name, buffer) for name, buffer in model.named_buffers()},
        optimizer={**rest["optimizer"], "group_names": groups, "skipped_steps": optimizer.skipped_steps},
        scheduler=rest["scheduler"],
        random=to_plain(take_random_states(engine.device.torch_device)),
        extra=rest["extra"],
    )


def check_name(processes: ProcessGroup, directory: Path) -> None:
    """Raises ValueError unless all processes that write one checkpoint call it the same."""
    names = processes.all_gather_object(directory.name)
    for rank, name in enumerate(names):
        if name != names[0]:
            raise ValueError(
                f"all processes that train a model save it in one directory, together (got {names[0]} in process 0 and "
                f"{name} in process {rank}); pass the same one in each"
            )


def check_extra(processes: ProcessGroup, extra: Any) -> None:
    """Raises ValueError unless all processes that write one checkpoint have the same ``extra``, which is kept once."""
    everyone = processes.all_gather_object(extra)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                "a checkpoint keeps one extra, which all processes must pass alike (got "
                f"{str(from_plain(everyone[0]))[:200]} in process 0 and {str(from_plain(other))[:200]} in process "
                f"{rank}); pass what all have, gathered by torch.distributed.all_gather_object, say"
            )


def joined(parts: Sequence[Manifest]) -> Manifest:
    """Returns the manifest of a checkpoint that several processes have written, in the order of their ranks.

    Each has its own random states; of everything else that is not a parameter's or a buffer's, the first one's hold:
    :func:`check_extra` has compared what the user gave.
    """
    first, *others = parts
    if not others:
        return first
    return replace(
        first,
        step=max(part.step for part in parts),
        files={name: entry for part in parts for name, entry in part.files.items()},
        parameters={name: entry for part in reversed(parts) for name, entry in part.parameters.items()},
        buffers={name: entry for part in reversed(parts) for name, entry in part.buffers.items()},
        random={"processes": [part.random for part in parts]},
    )


def write_file(path: Path, unit: str, tensors: Mapping[str, Tensor], written: Any = lambda: None) -> FileEntry:
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


def known(buffer: Tensor) -> Tensor:
    """Returns what stands for a buffer in a file: its bytes, where safetensors does not know its dtype."""
    return buffer if buffer.dtype in DTYPES else buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
