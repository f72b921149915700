"""Writes a checkpoint with ``torch.distributed.checkpoint``, for other programs that train the model."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from stronghold.checkpoint.file_writing import manifest_of
from stronghold.checkpoint.unit_tensors import Names, names_of, persistent_buffers, step_of
from stronghold.engine import Engine
from stronghold.engine.adamw import AdamW
from stronghold.formats.dcp import BUFFERS, MODEL, OPTIMIZER, OWN, RECORD
from stronghold.formats.manifest import Manifest, ParameterEntry, content_of
from stronghold.native import Blocks
from stronghold.optim.blocks import decode
from stronghold.optim.muon_groups import is_muon
from stronghold.optim.states import ADAMW_MOMENTS, MUON_MOMENTS, ParameterState
from stronghold.unit import ProcessGroup, Unit, from_rank0

T = TypeVar("T")

_SYNC_BYTES = 256 * 2**20
"""What is written of a file between two syncs: one of all of it, at its end, may take so long that it seems to hang."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this process has of a checkpoint: ``state`` without the model's tensors, and what ``take`` each of them."""

    manifest: Manifest
    state: dict[str, dict[str, Any]]
    take: dict[str, Callable[[], Tensor]]


def own_content(
    directory: Path,
    model: nn.Module,
    engine: Engine,
    optimizer: AdamW,
    groups: list[list[str]],
    rest: dict[str, Any],
) -> Content:
    """Returns what this process has to write.

    Masters and moments are in fp32, by the names and in the form that ``get_model_state_dict`` and
    ``get_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict`` give them. ``groups`` are the names of
    the parameters in each of the optimizer's groups, in all processes, and ``rest`` is what :func:`settings_of`
    returned.
    """
    names, states = names_of(model), optimizer.state  # which waits for the updates under way
    moments_of = {
        parameter: MUON_MOMENTS if is_muon(group) else ADAMW_MOMENTS
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    parameters: dict[str, ParameterEntry] = {}
    take: dict[str, Callable[[], Tensor]] = {}
    for unit in engine.units:
        engine.take_writes(unit)
        for index, (name, parameter) in enumerate(zip(names[unit], unit.parameters, strict=True)):
            like = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            step = step_of(parameter, states)
            parameters[name] = ParameterEntry(shape=list(parameter.shape), file="", step=step)
            weights[name] = like
            take[f"{MODEL}.{name}"] = partial(_master, engine, unit, index)
            keys = moments_of.get(parameter)
            if keys is None or (step is None and not parameter.requires_grad):
                continue
            is_counted = keys == ADAMW_MOMENTS  # Muon has no use for it
            counted = {"step": torch.tensor(step or 0.0, device="cpu")} if is_counted else {}
            moments[name] = {**counted, **dict.fromkeys(keys, like)}
            for key in keys:  # torch's own programs have moments before a first step, too
                taken = partial(_moment, engine, unit, states.get(parameter), key, parameter.shape)
                take[f"{OPTIMIZER}.state.{name}.{key}"] = taken
    for alias, name in _aliases(model, names).items():
        weights[alias], take[f"{MODEL}.{alias}"] = weights[name], take[f"{MODEL}.{name}"]
    buffers, persistent = dict(model.named_buffers(remove_duplicate=False)), persistent_buffers(model)
    own = {name: buffer.detach() for name, buffer in buffers.items() if name not in persistent}
    state: dict[str, dict[str, Any]] = {
        MODEL: weights | {name: buffer.detach() for name, buffer in buffers.items() if name in persistent},
        OPTIMIZER: {"state": moments, "param_groups": _groups(optimizer, groups)},
        OWN: {BUFFERS: own},
    }
    manifest = manifest_of(directory, model, engine, optimizer, groups, {}, parameters, rest)
    return Content(manifest=replace(manifest, states="fp32"), state=state, take=take)


def write_distributed(content: Content, manifest: Manifest, processes: ProcessGroup) -> None:
    """Writes a checkpoint with the ``manifest`` of all processes, which call this together.

    What ``dcp.save`` does, with its planner and writer, but between the steps the processes meet as they do elsewhere:
    one that hangs or fails is told of. Raises OSError, with the file's name, where the disk refuses.
    """
    own = {**content.state[OWN], RECORD: json.dumps(content_of(manifest), allow_nan=False)}
    planner, first = _SavePlanner(content.take), processes.rank == 0
    # With anything to copy ahead, tensors would be taken before those in front of them are written.
    writer = dcp.FileSystemWriter(manifest.directory, per_thread_copy_ahead=0)
    writer.fs = files = _Files()

    def plan_own() -> SavePlan:
        planner.set_up_planner({**content.state, OWN: own}, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> tuple[list[SavePlan], Metadata]:
        plans, metadata = planner.create_global_plan(wanted)
        return writer.prepare_global_plan(plans), metadata

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(plans[processes.rank]), planner).wait()

    wanted = processes.all_gather_object(processes.run_on_all(plan_own))
    plans, metadata = from_rank0(processes, plan_all)
    results = processes.all_gather_object(processes.run_on_all(lambda: files.named(write)))
    from_rank0(processes, lambda: files.named(lambda: writer.finish(metadata, results)))


class _Files(FileSystem):
    """Remembers what the disk refused, which torch's writer of tensors does not pass on."""

    error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with io.BufferedWriter(_File(self, path)) if mode == "wb" else open(path, mode) as stream:
                yield stream
        except OSError as error:
            self.refused(path, error)
            raise

    def named(self, action: Callable[[], T]) -> T:
        """Runs ``action``; what the disk refused in it is raised in place of what torch makes of that."""
        try:
            return action()
        except Exception:
            if self.error is None:
                raise
            raise self.error from None

    def refused(self, path: str | os.PathLike[str], error: OSError) -> None:
        self.error = self.error or OSError(error.errno, error.strerror, str(path))


class _File(io.FileIO):
    def __init__(self, files: _Files, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._files, self._path = files, path
        self._unsynced_bytes = 0

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
            self._unsynced_bytes += count
            if self._unsynced_bytes >= _SYNC_BYTES:
                os.fsync(self.fileno())
                self._unsynced_bytes = 0
            return count
        except OSError as error:
            self._files.refused(self._path, error)
            raise

    def close(self) -> None:
        """Syncs what is left: torch syncs a file while its end may still be in the buffer."""
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        except OSError as error:
            self._files.refused(self._path, error)
            raise
        finally:
            super().close()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Takes each tensor of the model when it is written, and where several processes have one, the first's."""

    def __init__(self, take: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._take = take
        self._written: Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._take:
            return super().lookup_object(index)
        if self._written is not None:
            self._written.untyped_storage().resize_(0)  # the writer holds all tensors of a file until it is closed
        self._written = self._take[index.fqn]()
        return self._written


def _master(engine: Engine, unit: Unit, index: int) -> Tensor:
    """Returns a copy of a weight's fp32 master on the host."""
    master = _on_host(unit.master(index).detach(), unit.weight[index])
    engine.store.drop(unit)
    return master


def _moment(engine: Engine, unit: Unit, state: ParameterState | None, key: str, shape: torch.Size) -> Tensor:
    """Returns a copy of a moment in fp32 on the host; zeros where there is none yet."""
    if not state:
        return torch.zeros(shape, device="cpu")
    moment = state[key]
    if isinstance(moment, Blocks):
        value = _on_host(decode(moment, signed=key == "exp_avg").view(shape), moment.codes)
    else:
        value = _on_host(moment, moment)
    engine.store.drop(unit)
    return value


def _on_host(value: Tensor, held: Tensor) -> Tensor:
    """Returns ``value`` on the host, in memory that is not that of ``held``."""
    return value.to("cpu", copy=value.data_ptr() == held.data_ptr())


def _aliases(model: nn.Module, names: Names) -> dict[str, str]:
    """Returns the further names of parameters that have several, which a ``state_dict()`` has, too."""
    known = {id(p): name for unit, own in names.items() for name, p in zip(own, unit.parameters, strict=True)}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: known[id(p)] for name, p in everything if name != known[id(p)]}


def _groups(optimizer: AdamW, names: list[list[str]]) -> list[dict[str, Any]]:
    return [
        {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"} | {"params": own}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]
