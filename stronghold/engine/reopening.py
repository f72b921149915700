"""The values of a model in a store's directory that was kept: where they are on disk they stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn

from stronghold.errors import CheckpointError, StoreError
from stronghold.formats.built_buffers import BuiltBuffers, tell_of
from stronghold.formats.manifest import BUFFERS, Manifest, UnitFileEntry, read_manifest
from stronghold.formats.reader import FileReader, UnitReader
from stronghold.store import DiskStore, in_memory
from stronghold.unit import Unit, all_parameters


def kept_on_disk(model: nn.Module, directory: str) -> list[nn.Parameter]:
    """Returns the parameters of which the checkpoint in place in ``directory`` has something in a unit's own file.

    None where there is no such checkpoint that can be read, which the store refuses later.
    """
    with suppress(CheckpointError):
        kept = read_manifest(Path(directory))
        placed = {name for name, one in kept.parameters.items() if isinstance(kept.files[one.file], UnitFileEntry)}
        return [parameter for name, parameter in model.named_parameters() if name in placed]
    return []


class Reopened:
    """The values that lie where the store is; those that a model has are replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []

    def place(self, store: DiskStore, units: Sequence[Unit], built: BuiltBuffers) -> None:
        """Gives all units the memory that they were kept in, and reads what is not on disk.

        ``built`` are the model's buffers. Raises StoreError for a model with other parameters, or one that is placed
        otherwise.
        """
        kept = store.reopened
        assert kept is not None
        self._buffers = list(self._restored(kept, built))
        names = {id(parameter): name for name, parameter in all_parameters(self._model)}
        for unit in units:
            named = [names[id(parameter)] for parameter in unit.parameters]
            for name in named:
                if name not in kept.parameters:
                    raise StoreError(
                        f"the store at {kept.directory}, with a run after step {kept.step:g}, belongs to another model "
                        f"(it has no parameter {name}); pass another directory"
                    )
            store.place_kept(unit)
            tensors = {}
            for index, name in enumerate(named):
                tensors[name] = unit.weight[index]
                if index in unit.masters.remainders:
                    tensors[f"{name}/remainder"] = unit.masters.remainders[index]
            wanted = in_memory(kept, store, unit, named, tensors, whole=False)
            with UnitReader(kept, named) as reader:
                for name in wanted:
                    reader.read_to(name, tensors[name])

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yields the buffers that get a value, by owner and name."""
        return iter(self._buffers)

    def _restored(self, kept: Manifest, built: BuiltBuffers) -> Iterator[tuple[nn.Module, str, Tensor]]:
        if not kept.buffers:
            return
        unknown = []
        with FileReader(kept, BUFFERS) as file:
            for prefix, module in self._model.named_modules():
                for own in module._buffers:
                    name = f"{prefix}.{own}" if prefix else own
                    if (entry := kept.buffers.get(name)) is None:
                        continue
                    saved = file.read_buffer(name, entry)
                    takes = built.takes(module, own, name, entry, saved)
                    unknown += [name] if takes is None else []
                    if takes is not False:  # of which checkpoint.load tells
                        yield module, own, saved
        tell_of([], unknown, kept.directory)
