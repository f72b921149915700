"""Checkpoints in transformers' format, streamed into a model and out of it: ``load(dir)`` and ``save(model, dir)``."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from stronghold.checkpoint.adapters import has_adapters, save_adapters
from stronghold.checkpoint.kept_weights import keep_quantised
from stronghold.checkpoint.quantising import quantise
from stronghold.engine.compiled import uncompiled
from stronghold.engine.offload import offload
from stronghold.errors import ParallelError
from stronghold.formats.conversion import from_model
from stronghold.formats.model_config import build, read_generation_config, write_config
from stronghold.formats.mounts import check_no_mount
from stronghold.formats.pieces import Group
from stronghold.formats.quantised_files import QuantisedFiles
from stronghold.formats.sync import sync_directory, sync_path
from stronghold.formats.tensor_files import TensorFileWriter
from stronghold.formats.weight_files import INDEX, SINGLE
from stronghold.unit import ONE_PROCESS, ProcessGroup, Unit, is_packed, unit_of
from stronghold.units import parse_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAPTERS = ("adapter_model*", ADAPTER_CONFIG)
"""What saving adapters replaces in a folder; the rest, such as the model that they are of, stays."""
_REPLACED = ("*.safetensors", "pytorch_model*", INDEX, "config.json", "generation_config.json", *_ADAPTERS)
"""What saving a model replaces in a folder; the rest, such as a tokenizer, stays."""


def load(
    directory: str | os.PathLike[str],
    *,
    model_class: Any = None,
    quantize: str | None = None,
    frozen: bool = False,
    **options: Any,
) -> nn.Module:
    """Loads a checkpoint straight into the store, layer by layer, and returns the offloaded model.

    ``directory`` holds a config.json and safetensors files, sharded or not, as transformers' ``save_pretrained`` and
    :func:`save` write them. ``model_class`` is one of transformers' classes, such as ``AutoModel``, or one of the
    user's own with ``from_config_dict`` (see :mod:`stronghold.formats.model_config`); by default it is the one of
    transformers that the config names, or AutoModelForCausalLM where that names none. ``options`` are those of
    :func:`offload` (``window``, ``store``, ``device``, ``dtype``, ``experts_per_part``, ...). No more than one layer,
    and one tensor of the files, is in memory beside the store.

    With ``quantize="nf4"`` the linear layers' weights are bitsandbytes' in four bits, quantised tensor by tensor as
    they come, and frozen: a base for adapters, 0.5625 bytes per parameter; ``"nf4_nested"`` has its scales in eight
    bits, 0.516. ``"int8"`` are bitsandbytes' eight bits, a byte per parameter and 4 per row. Files that hold weights so
    already, or in torchao's tensor subclasses, as transformers' ``save_pretrained`` writes them, are read as they are.

    With ``frozen`` no parameter has ``requires_grad``: a base for adapters, of which the store has the weights in the
    type that they compute in and never the 16 bits beside them that bf16 weights have for training.

    The model is what ``from_pretrained(directory)`` and :func:`offload` would make: its parameters have the dtype that
    the config names (without one the files'), and it is in evaluation mode; call
    ``train()`` for dropout. Nothing is fetched from a hub. Where a process was killed while :func:`save` replaced a
    model there, the one before is read, and a RuntimeWarning says so. Raises ValueError, before anything is allocated,
    for a folder that is not such a checkpoint, and for tensors that are missing, of another shape, or not the model's;
    for files that are written in place while they are read, or replaced before the configuration was; and what
    :func:`offload` raises. What a :func:`save` of another process replaces later is read to its end as it was.
    """
    folder = _there(Path(directory))
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"a model must be a folder with a config.json (got {str(directory)!r}); pass one, "
            "such as hf download NAME --local-dir FOLDER makes"
        )
    checkpoint = QuantisedFiles(folder)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        known = settings.get("dtype") or settings.get("torch_dtype")
        kept = settings.get("quantization_config")
        dtype = None if known else checkpoint.dtype()
        model = build(
            file,
            dtype=dtype,
            model_class=model_class or _class_of(settings),
            unquantised=bool(checkpoint.kept),
            name=str(directory),
        )
    except ModuleNotFoundError:  # transformers itself is no dependency
        raise
    except Exception as error:  # transformers raises all kinds for what it cannot read
        problem = " ".join(str(error).split())[:300]
        raise ValueError(
            f"a model's config.json must be one that transformers or this program reads (got {str(file)!r}: "
            f"{problem}); pass another, or mend it"
        ) from error
    checkpoint.check_in_place()  # the configuration is that of these weights
    model.eval()
    read_generation_config(model, folder)
    if checkpoint.kept:
        if quantize is not None:
            raise ValueError(
                f"quantize is for weights in 16 or 32 bits (got {quantize!r} for {str(directory)!r}, whose files hold "
                "quantised ones); leave it out"
            )
        keep_quantised(model, checkpoint, kept or {})
    if quantize is not None:
        quantise(model, quantize, layers=options.get("layers"), dtype=options.get("dtype"))
    if frozen:
        model.requires_grad_(False)
    return offload(model, weights=checkpoint, **options)  # the one that was opened before the configuration was read


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a model's weights and configuration into ``directory``, tensor by tensor, as transformers reads them.

    Works for offloaded models and all others; updates under way are waited for. ``dtype`` is that of the parameters
    in the files: by default the one in which the model computes, as ``save_pretrained`` would write; with
    ``torch.float32`` a model that computes in bf16 is written as its fp32 masters, to the bit. Buffers keep theirs.
    Files are ``model.safetensors``, or shards of up to ``max_shard_size`` and their index, beside config.json and
    generation_config.json; a model without a configuration of transformers is written without those. What a
    parameter of several names is called, and names and shapes themselves, are what ``save_pretrained`` would choose.

    Of a model with PEFT's adapters those are saved, as its ``save_pretrained`` saves them: adapter_model.safetensors
    and adapter_config.json, of several adapters in a folder each. All adapters are in memory at a time.

    The folder appears, or changes, only when all of it is written: until then the new files are in a hidden one beside
    it. A :func:`load` that is reading it meanwhile has the model before, or ends with an error, but never parts of
    both. A model takes the place of the model and of the adapters that the folder held, adapters that of adapters
    alone; what else it held stays, such as a tokenizer, or the model that the adapters are of. Raises ValueError for a
    folder that holds something other than a model or is a mount point, and for a part of a model with PEFT's adapters,
    and OSError, naming the folder, where it cannot be written.

    Of replicas (``stronghold.replicate``) the first process writes. All may call this, with the same ``directory``, and
    the others then wait until the folder is there, and raise where it cannot be written; or the first one may alone,
    which waits for none of them. Do either throughout a run: the others take the first's n-th save of a folder for
    their own n-th. Of a model in stages each process has its own layers only: ParallelError there. Save a checkpoint by
    ``stronghold.checkpoint.save``, load it in one process, and save the model from there.
    """
    _save(model, Path(directory), dtype, max_shard_size)


def save_with_others(
    model: nn.Module,
    directory: str | os.PathLike[str],
    write: Callable[[Path], None],
    replaces: Callable[[Path], bool],
) -> None:
    """Saves a model as :func:`save` does, with the files that ``write`` writes into a folder, such as a tokenizer's.

    They take the place of those of their names, and with a model of all there of which ``replaces`` is true: beside
    adapters these may be the base's, which the tokenizer that is written has not all of.
    """
    _save(model, Path(directory), None, "5GB", write, replaces)


def _save(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    write_others: Callable[[Path], None] | None = None,
    replaces: Callable[[Path], bool] = lambda path: False,
) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype must be torch.float32, torch.bfloat16 or torch.float16 (got {dtype}); pass one of them"
        )
    limit, model = parse_bytes(max_shard_size), uncompiled(model)
    processes = _processes_of(model)
    processes.run_on_first(lambda: _replace(model, folder, dtype, limit, write_others, replaces), f"save {folder}")


def _processes_of(model: nn.Module) -> ProcessGroup:
    """Returns the processes that have all of this model each; ParallelError where it is in stages."""
    unit = next((unit for parameter in model.parameters() if (unit := unit_of(parameter)) is not None), None)
    if unit is None:
        return ONE_PROCESS
    processes: ProcessGroup = unit.owner.processes
    if (replicas := unit.owner.replicas.world_size) < processes.world_size:
        raise ParallelError(
            "stronghold.save writes a model that is whole in each process (got one in stages, of which each process "
            f"has its own layers: {processes.world_size // replicas} processes have it); call "
            "stronghold.checkpoint.save(directory, model, optimizer) in all of them, then load that checkpoint into "
            "the model in one process, and save it from there",
            ours=processes.rank == 0,
        )
    return processes


def _replace(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    limit: int,
    write_others: Callable[[Path], None] | None,
    replaces: Callable[[Path], bool],
) -> None:
    check_save_folder(folder)
    folder = Path(os.path.realpath(folder))  # a link stays one: what it points to is replaced
    outgoing = None if has_adapters(model) else _Outgoing(model, dtype)

    def goes(path: Path) -> bool:
        return _matches(path, _ADAPTERS) if outgoing is None else replaces(path) or _matches(path, _REPLACED)

    partial = folder.with_name(f".{folder.name}.partial")
    replaced, removed = _replaced(folder), folder.with_name(f".{folder.name}.removed")
    try:
        _put_back(folder)  # of a process that was killed in between
        for left in partial, removed:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        if outgoing is None:
            if (card := folder / "README.md").is_file():
                shutil.copyfile(card, partial / "README.md")  # PEFT puts its own lines into it
            _write_adapters(model, partial, dtype)
        else:
            _write(outgoing, partial, limit)
            write_config(model, partial, outgoing.dtype)
        if write_others is not None:
            write_others(partial)
        if folder.exists():  # last: a file with two names that were written to would change in the folder too
            _keep_others(folder, partial, goes)
        for written in partial.rglob("*"):
            sync_path(written)
        sync_directory(partial)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial.rename(folder)
        if replaced.exists():
            replaced.rename(removed)  # half of a model is never taken for one
            shutil.rmtree(removed, ignore_errors=True)
        sync_directory(folder.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot save the model ({error.strerror or error})", str(folder)) from error
    finally:
        _put_back(folder)
        shutil.rmtree(partial, ignore_errors=True)  # what is still there is no model, and may fill the disk


def _replaced(folder: Path) -> Path:
    """Returns where the model that ``folder`` holds is while another takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def _put_back(folder: Path) -> None:
    """Gives the model its name back that was to be replaced, where no other has taken it."""
    if not folder.exists() and _replaced(folder).exists():
        _replaced(folder).rename(folder)


def _there(folder: Path) -> Path:
    """Returns where the model of ``folder`` is: beside it, where saving another ended before that had its name."""
    replaced = _replaced(Path(os.path.realpath(folder)))
    if folder.exists() or not replaced.exists():
        return folder
    warnings.warn(
        f"{folder} was being replaced when a process ended, and the model that it held is read from {replaced}; rename "
        "that, or save a model there again",
        RuntimeWarning,
        stacklevel=3,
    )
    return replaced


def check_save_folder(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError if ``folder`` holds something other than a model, which saving would replace, or is a mount."""
    check_no_mount(folder)
    folder = Path(folder)
    names = ("config.json", SINGLE, INDEX, ADAPTER_CONFIG)
    if folder.exists() and not (
        folder.is_dir() and (any((folder / name).is_file() for name in names) or not any(folder.iterdir()))
    ):
        raise ValueError(
            f"a folder to save in must be new, empty or hold a model with its config.json (got {str(folder)!r}); "
            "pass another"
        )


@dataclass(frozen=True)
class _Item:
    """A parameter or buffer that is saved: where it lives, if it is offloaded, and its place there."""

    tensor: Tensor
    dtype: torch.dtype
    unit: Unit | None
    index: int

    def value(self) -> Tensor:
        """Returns what is written, in the dtype in which it is."""
        if self.unit is None:
            return self.tensor.detach().to(self.dtype)
        exact = self.unit.dtypes[self.index] != self.dtype
        value: Tensor = self.unit.owner.settled_value(self.unit, self.index, exact=exact)
        return value.to(self.dtype)


class _Outgoing:
    """What of a model is saved, by the names that its files will have; reading one tensor needs no other."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        parameters = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
        self.dtype = dtype or next(iter(parameters), torch.float32)
        saved = dict(_saved(model))
        if packed := [name for name, tensor in saved.items() if is_packed(tensor)]:
            raise ValueError(
                f"quantised weights are not written by stronghold.save (got {packed[0]}); write the model's adapters "
                "alone, by saving the PeftModel, or all of it by model.save_pretrained(directory)"
            )
        self._items = {name: _item(tensor, dtype) for name, tensor in saved.items()}
        if meta := [name for name, item in self._items.items() if item.tensor.is_meta]:
            raise ValueError(
                f"parameters must have values to be saved ({meta[0]} is on the meta device); load it first"
            )
        self.groups = from_model(model, self._items)
        self._last: Unit | None = None

    def announce(self, group: Group) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns dtype and shape of what a group becomes, by name."""
        items = [self._items[source] for source in group.sources]
        empty = [torch.empty(item.tensor.shape, dtype=item.dtype, device="meta") for item in items]
        return {name: (value.dtype, value.shape) for name, value in group.convert(empty).items()}

    def values(self, group: Group) -> dict[str, Tensor]:
        """Returns what a group becomes, by name."""
        values = []
        for item in (self._items[source] for source in group.sources):
            if item.unit is not self._last:
                self.drop()
            values.append(item.value())
            self._last = item.unit
        return group.convert(values)

    def drop(self) -> None:
        """Takes the unit that was read last out of the resident set."""
        if self._last is not None:
            self._last.drop()

    def elements(self) -> int:
        return sum(item.tensor.numel() for item in self._items.values() if isinstance(item.tensor, nn.Parameter))


def _item(tensor: Tensor, dtype: torch.dtype | None) -> _Item:
    parameter = isinstance(tensor, nn.Parameter)
    return _Item(
        tensor,
        dtype if dtype and parameter and tensor.is_floating_point() else tensor.dtype,
        unit_of(tensor) if isinstance(tensor, nn.Parameter) else None,
        tensor.__dict__.get("_index", 0),
    )


def _write_adapters(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    read: dict[int, _Item] = {}

    def value(tensor: Tensor) -> Tensor:
        item = read[id(tensor)] = _item(tensor, dtype)
        return item.value()

    save_adapters(model, folder, value, dtype)
    for unit in {item.unit for item in read.values() if item.unit is not None}:
        unit.drop()


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers in the order of ``state_dict``, each under one name.

    Of several names it is the one that ``save_pretrained`` keeps: the one that a transformers model ties others to.
    """
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(tensor), []).append((f"{prefix}.{name}" if prefix else name, tensor))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for names in found.values():
        name, tensor = next((one for one in names if one[0] not in tied), names[0])
        if name not in left_out:
            yield name, tensor


def _write(outgoing: _Outgoing, folder: Path, limit: int) -> None:
    shards = list(_shards([(group, outgoing.announce(group)) for group in outgoing.groups], limit))
    count, index, total = len(shards), {}, 0
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        announced = {name: one for _, announced in shard for name, one in announced.items()}
        with TensorFileWriter(folder / file, announced, {"format": "pt"}) as writer:
            for group, _ in shard:
                for name, value in outgoing.values(group).items():
                    writer.write(name, value)
            outgoing.drop()
        index.update(dict.fromkeys(announced, file))
        total += sum(_bytes(one) for one in announced.values())
    if count != 1:
        metadata = {"total_parameters": outgoing.elements(), "total_size": total}
        text = json.dumps({"metadata": metadata, "weight_map": index}, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


_Announced = dict[str, tuple[torch.dtype, torch.Size]]


def _shards(groups: Sequence[tuple[Group, _Announced]], limit: int) -> Iterator[list[tuple[Group, _Announced]]]:
    """Yields the groups of each file in turn: as many as fit, and at least one."""
    shard: list[tuple[Group, _Announced]] = []
    size = 0
    for group, announced in groups:
        own = sum(_bytes(one) for one in announced.values())
        if shard and size + own > limit:
            yield shard
            shard, size = [], 0
        shard.append((group, announced))
        size += own
    yield shard


def _bytes(announced: tuple[torch.dtype, torch.Size]) -> int:
    return announced[0].itemsize * announced[1].numel()


def _keep_others(folder: Path, partial: Path, goes: Callable[[Path], bool] = lambda path: False) -> None:
    """Puts into ``partial``, too, what ``folder`` holds but for what ``goes``, and what has been written anew."""
    for path in folder.iterdir():
        if goes(path):
            continue
        other = partial / path.name
        if not os.path.lexists(other):
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, other, symlinks=True, copy_function=_keep)
            else:
                _keep(path, other)
        elif path.is_dir() and other.is_dir() and not path.is_symlink():
            _keep_others(path, other)


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def _keep(path: str | Path, other: str | Path) -> None:
    """Gives a file a second name, under which whoever has it open goes on with it: a log, or a store in use.

    A base may be larger than the free space. On a file system without hard links the file is copied.
    """
    if not os.path.islink(path):
        try:
            os.link(path, other)
        except OSError:
            pass
        else:
            return
    shutil.copy2(path, other, follow_symlinks=False)


def _class_of(settings: dict[str, Any]) -> Any:
    """Returns the class that a config names, or None where it names none, or one that transformers does not have."""
    import transformers

    names = settings.get("architectures") or [None]
    return getattr(transformers, names[0], None) if isinstance(names[0], str) else None
