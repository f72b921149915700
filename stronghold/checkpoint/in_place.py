"""A checkpoint in the directory of the model's own store: what is on disk stays where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from stronghold.checkpoint.file_writing import file_names, manifest_of, write_buffers, write_file
from stronghold.checkpoint.unit_tensors import Names, all_groups, engine_for, names_of, step_of, tensors_of
from stronghold.engine import Engine
from stronghold.engine.adamw import AdamW
from stronghold.errors import StoreError
from stronghold.formats.manifest import BUFFERS, FileEntry, Manifest, ParameterEntry, UnitFileEntry
from stronghold.formats.reader import UnitReader
from stronghold.store import DiskStore, check_free, in_memory


def save_in_place(model: nn.Module, engine: Engine, optimizer: AdamW, rest: dict[str, Any]) -> Path:
    """Makes the store's directory a checkpoint; returns it. ``rest`` is what :func:`settings_of` returned.

    One that it was before stays one until all is written but the manifest.
    """
    store = engine.store
    assert isinstance(store, DiskStore)
    if not store.has_all:
        raise StoreError(
            f"a checkpoint in the store's own place has all that the model had at offload() (got {store.paths[0]}, "
            "beside which parameters were added since, such as adapters); save into another directory, or add them "
            "before offload()"
        )
    store.check_in_place()
    directory = store.paths[0]
    engine.close_backward()
    names, states = names_of(model), optimizer.state  # which waits for the updates under way
    groups = all_groups(engine.processes, optimizer, names)
    files: dict[str, FileEntry | UnitFileEntry] = {}
    parameters: dict[str, ParameterEntry] = {}
    beside: list[Path] = []

    def partial(name: str) -> Path:
        beside.append(directory / f"{name}.partial")
        return beside[-1]

    try:
        for unit in engine.units:
            engine.take_writes(unit)
        for unit, name in file_names(engine).items():
            tensors = tensors_of(unit, names[unit], states)
            own = []
            if (found := store.entry(unit, tensors)) is not None:
                files[found[0]] = found[1]
                own.append(found[0])
            rest_of_it = {name: tensor for name, tensor in tensors.items() if store.find(unit, tensor) is None}
            if rest_of_it:
                files[name] = write_file(partial(name), unit.name, rest_of_it)
                own.append(name)
            for parameter_name, parameter in zip(names[unit], unit.parameters, strict=True):
                parameters[parameter_name] = ParameterEntry(
                    shape=list(parameter.shape),
                    file=own[0],
                    step=step_of(parameter, states),
                    beside=own[1] if len(own) == 2 else None,
                )
        files |= write_buffers(partial(BUFFERS), model)
        manifest = manifest_of(directory, model, engine, optimizer, groups, files, parameters, rest)
        store.seal(manifest, [path for path in beside if path.exists()])
    except BaseException:
        for path in beside:
            path.unlink(missing_ok=True)
        raise
    return directory


def check_space_beside(model: nn.Module, optimizer: AdamW) -> None:
    """Raises StoreError where the store's directory has no room for what :func:`save_in_place` writes beside the files.

    What is on disk has its room already. Of a checkpoint that is there, the files beside stay until new ones are whole.
    """
    engine, names = engine_for(model, optimizer), names_of(model)
    beside = sum(buffer.nbytes for buffer in model.buffers())
    for unit in engine.units:
        tensors = tensors_of(unit, names[unit], optimizer.states_to_come(unit))
        beside += sum(tensor.nbytes for tensor in tensors.values() if engine.store.find(unit, tensor) is None)
    check_free(engine.store.paths[:1], beside, "what the store's checkpoint has beside the units' files")


def check_in_place(kept: Manifest, engine: Engine, optimizer: AdamW, names: Names) -> None:
    """Raises StoreError where the model and its optimizer do not lie in their store as it was kept."""
    for unit in engine.units:
        tensors = tensors_of(unit, names[unit], optimizer.state)
        in_memory(kept, engine.store, unit, names[unit], tensors, whole=True)


def load_in_place(kept: Manifest, engine: Engine, optimizer: AdamW, names: Names) -> None:
    """Reads what a unit has in memory; what it has on disk is there, and was verified when the store was opened."""
    for unit in engine.units:
        tensors = tensors_of(unit, names[unit], optimizer.state)
        wanted = in_memory(kept, engine.store, unit, names[unit], tensors, whole=True)
        with UnitReader(kept, names[unit]) as reader:
            for name in wanted:
                reader.read_to(name, tensors[name])
        for target, weight in zip(unit.on_device, unit.weight, strict=False):
            target.copy_(weight)
        unit.rewritten()
        unit.supersede()
    assert isinstance(engine.store, DiskStore)
    for other in engine.optimizers.others(optimizer):
        other.distrust()  # its states were not kept, and where it has its moments the file may have those of then
    engine.store.loaded()
