"""Gives a model's parameters their values, one unit after another: their own, a checkpoint's, or an initialiser's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from stronghold.formats.adapter_names import base_of, copies_in, modules_of_base
from stronghold.formats.conversion import into_model, remember
from stronghold.formats.pieces import Group
from stronghold.formats.quantised_files import QuantisedFiles
from stronghold.formats.weight_files import WeightFiles, some
from stronghold.unit import all_parameters, is_packed, pack, parts_of, unpacked

MAY_HOLD, _MAY_LACK = "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing"
Initialiser = Callable[[nn.Module], object]
Weights = str | os.PathLike[str] | Initialiser
Unit = tuple[int, Iterable[Tensor]]


class Source(Protocol):
    """Where values come from."""

    def units(self, units: Sequence[Sequence[nn.Parameter]], layers: Sequence[nn.Module]) -> Iterator[Unit]:
        """Yields each of ``units``, sets of parameters, by its number and with the values of its parameters in turn.

        In an order of its own. The values have the parameters' dtypes, and are in memory only until the next is asked
        for. ``layers`` are the modules that are in memory whole where an initialiser sees them.
        """

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yields the buffers that get a value, by owner and name."""


def open_weights(model: nn.Module, weights: Weights | None) -> Source:
    """Returns where the values of ``model`` come from; changes nothing.

    ``weights`` is a checkpoint's folder, an initialiser, or None for the values that the model has. Raises ValueError
    where it does not give each parameter and buffer on the meta device, and no others, a value of its shape.
    """
    if weights is None:
        _refuse_meta(model)
        return Own()
    if isinstance(weights, QuantisedFiles):
        return FromCheckpoint(model, weights)
    if isinstance(weights, (str, os.PathLike)):
        return FromCheckpoint(model, QuantisedFiles(weights))
    if not callable(weights):
        raise ValueError(
            "weights must be a checkpoint's folder, or a function that initialises the module that it is given (got "
            f"{weights!r})"
        )
    _refuse_meta_buffers(model, [(m, n) for m in model.modules() for n in m._buffers])
    return FromInitialiser(model, weights)


def fill(model: nn.Module, weights: Weights | None) -> None:
    """Gives all that is on the meta device its values at once, as ``offload(model, weights=weights)`` would do.

    For models that fit in memory. Raises what :func:`open_weights` does.
    """
    source = open_weights(model, weights)
    parameters = list(model.parameters())
    # All of them before the first is given: an initialiser is to see the same as where they are moved away.
    rows = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    units = source.units([[p] for p in parameters], [layer for row in rows for layer in row])
    values = {number: [value.clone() for value in unit] for number, unit in units}
    for number, parameter in enumerate(parameters):
        give_values(parameter, values.pop(number)[0])
    for module, name, value in source.buffers():
        module._buffers[name] = value


def give_values(parameter: nn.Parameter, memory: Tensor) -> None:
    """Makes ``memory`` the data of a parameter, which stays the same object: one on the meta device becomes real."""
    if parameter.is_meta:
        empty = torch.empty(0, dtype=memory.dtype, device="cpu")
        exchange(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    parameter.data = memory


def exchange(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Exchanges the tensors of two parameters, which keep their classes, their attributes, and who refers to them.

    ``torch.utils.swap_tensors`` exchanges classes and attributes as well, and so refuses what is referred to weakly:
    nn.RNNBase refers to its weights so.
    """
    torch._C._swap_tensor_impl(parameter, other)


class Own:
    """The values that the model has."""

    def units(self, units: Sequence[Sequence[nn.Parameter]], layers: Sequence[nn.Module]) -> Iterator[Unit]:
        for number, unit in enumerate(units):
            yield number, [parameter.detach() for parameter in unit]

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        return iter(())


class FromCheckpoint:
    """The values in a checkpoint's files, each read when its unit is placed.

    A value is converted to its parameter's dtype, as ``load_state_dict`` does: bf16 and fp16 exactly to fp32. Of a
    parameter with several names one is enough. What is neither in the files nor on the meta device keeps its value:
    PEFT's adapters, whose files are those of the model that they are around. What trains as a whole, by
    ``modules_to_save``, begins as a copy of what it is beside.
    """

    def __init__(self, model: nn.Module, checkpoint: WeightFiles) -> None:
        self._checkpoint = checkpoint
        model = base_of(model)
        named: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = dict(all_parameters(model))  # a stage's have the names of the whole model
        persistent = []
        for prefix, module in modules_of_base(model):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    named[f"{prefix}.{name}" if prefix else name] = tensor
                    if name in module._buffers:
                        persistent.append((f"{prefix}.{name}" if prefix else name, module, name))
            for own, tensor in module._parameters.items():
                for name, part in () if tensor is None else parts_of(module, own, tensor):
                    parts[f"{prefix}.{name}" if prefix else name] = part
        named.update(getattr(model, "_names_of_shared", {}))  # a stage's, by those in other stages too
        # Scales have names of their own where the files hold them, and come of the weight where it is quantised here.
        named.update({name: one for name, one in parts.items() if name in checkpoint.entries})
        groups, conversions = into_model(model, checkpoint.entries, named)
        self._kept: dict[str, Tensor] = {}
        """What a group gave beside the value that was asked for."""
        self._scales: list[Tensor] = []
        """Those of the packed weight that was asked for last."""
        self._found = self._match(model, named, groups)
        for original, copy in copies_in(model):  # which are read twice
            if id(original) in self._found:
                self._found[id(copy)] = self._found[id(original)]
        self._check(model, named)
        self._buffers = [(module, name) for full, module, name in persistent if id(named[full]) in self._found]
        on_file = set(self._buffers)
        buffers = [(m, n) for m in model.modules() for n in m._buffers]
        _refuse_meta_buffers(model, [one for one in buffers if one not in on_file])
        self._compare_tied()
        remember(model, conversions)

    def units(self, units: Sequence[Sequence[nn.Parameter]], layers: Sequence[nn.Module]) -> Iterator[Unit]:
        for number, unit in enumerate(units):
            yield number, (self._value(parameter) for parameter in unit)

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module, name in self._buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            yield module, name, self._value(buffer).clone()  # a part of the mapped file until then

    def _value(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._found:
            return self._scales.pop(0) if is_packed(tensor) and tensor.is_meta else tensor.detach()
        (name, group), *_ = self._found[id(tensor)].items()
        value = self._read(name, group)
        wanted = tensor if any(map(self._checkpoint.is_kept, group.sources)) else unpacked(tensor)
        assert wanted is not None  # what nothing here can quantise values for was refused
        if wanted is tensor:
            return value.to(tensor.dtype)
        packed, *self._scales = pack(tensor, value.to(wanted.dtype))
        return packed

    def _read(self, name: str, group: Group) -> Tensor:
        if name not in self._kept:
            self._kept.update(group.convert([self._checkpoint.read(source) for source in group.sources]))
        return self._kept.pop(name)

    def _match(self, model: nn.Module, named: dict[str, Tensor], groups: list[Group]) -> dict[int, dict[str, Group]]:
        """Returns, by the id of each tensor that the files have, its names there and what it is made from.

        Raises ValueError for what does not fit.
        """
        found: dict[int, dict[str, Group]] = {}
        surplus: list[str] = []
        misshapen: list[str] = []
        for group in groups:
            entries = [self._checkpoint.entries[source] for source in group.sources]
            for name, value in group.convert([torch.empty(e.shape, device="meta") for e in entries]).items():
                there = named.get(name)
                kept = any(map(self._checkpoint.is_kept, group.sources))
                tensor = there if there is None or kept else unpacked(there)
                if there is not None and tensor is None:
                    misshapen.append(f"{name} as {entries[0].dtype}, the model's is a {type(there).__name__}")
                elif tensor is None or there is None or name in found.get(id(there), {}):
                    surplus += group.sources
                elif value.shape != tensor.shape:
                    misshapen.append(f"{name} of {tuple(value.shape)}, the model's is {tuple(tensor.shape)}")
                elif tensor.is_floating_point() and not all(map(self._checkpoint.is_floating, group.sources)):
                    misshapen.append(f"{name} as {entries[0].dtype}, the model's is {tensor.dtype}")
                else:
                    found.setdefault(id(there), {})[name] = group
        where = repr(str(self._checkpoint.directory))
        if misshapen:
            raise ValueError(
                f"a checkpoint's tensors must have the shapes and kinds of the model's (got {where} with "
                f"{some(misshapen)}); build the model from the checkpoint's own config.json"
            )
        if surplus := unless_ignored(model, surplus, MAY_HOLD):
            raise ValueError(
                f"a checkpoint must not hold more than the model (got {where} with {some(surplus)}, which "
                f"{type(model).__name__} lacks); build the model that it was saved from"
            )
        return found

    def _check(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        # A parameter that has a value is the user's to give (a new head); a buffer's first value is nobody's.
        lacking = [
            name
            for name, tensor in named.items()
            if id(tensor) not in self._found and (tensor.is_meta or not isinstance(tensor, nn.Parameter))
        ]
        needed = [name for name in lacking if named[name].is_meta]
        missing = [*needed, *unless_ignored(model, sorted(set(lacking) - set(needed)), _MAY_LACK)]
        if missing:
            tied = getattr(model, "all_tied_weights_keys", None) or ()  # transformers: what is tied to others
            remedy = (
                "call model.tie_weights() once the model is built: on the meta device its ties are lost"
                if set(missing) <= set(tied)
                else "build the model that it was saved from, or give what it lacks values beforehand"
            )
            raise ValueError(
                f"a checkpoint must hold every tensor of the model (in {str(self._checkpoint.directory)!r} missing "
                f"{some(missing)}); {remedy}"
            )

    def _compare_tied(self) -> None:
        """Refuses files in which one parameter of several names has several values."""
        for names in self._found.values():
            (one, group), *others = names.items()
            for other, its_group in others:
                if not torch.equal(self._read(one, group), self._read(other, its_group)):
                    raise ValueError(
                        f"{one} and {other} are one parameter of the model and must be equal in the checkpoint (got "
                        f"{str(self._checkpoint.directory)!r}, where they differ); build the model with "
                        "tie_word_embeddings=False in its config"
                    )


class FromInitialiser:
    """The values that a function writes into modules whose parameters have been given memory.

    Modules come as ``nn.Module.apply`` has them, children first: those of a layer, and those of a part of the model
    without layers, with all their parameters in memory. A parameter that has its value, because it was never on the
    meta device or a part before had it too, is left out, and so is a part in which all have.
    """

    def __init__(self, model: nn.Module, initialise: Initialiser) -> None:
        self._model = model
        self._initialise = initialise
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def units(self, units: Sequence[Sequence[nn.Parameter]], layers: Sequence[nn.Module]) -> Iterator[Unit]:
        unit_of = {id(parameter): number for number, unit in enumerate(units) for parameter in unit}
        lacking = [sum(parameter.is_meta for parameter in unit) for unit in units]
        values: dict[int, Tensor] = {}
        seen: set[int] = set()
        for modules in _visits(self._model, layers):
            own = [p for m in modules for p in m._parameters.values() if p is not None and p.is_meta]
            new = {id(p): p for p in own if id(p) not in seen and id(p) in unit_of}
            if not new:
                continue
            seen.update(new)
            values.update(self._draw(modules, list(new.values())))
            for number in dict.fromkeys(unit_of[key] for key in new):
                lacking[number] -= sum(unit_of[key] == number for key in new)
                if lacking[number] == 0:
                    yield number, [values.pop(id(p)) if id(p) in values else p.detach() for p in units[number]]
        for number, unit in enumerate(units):
            if not any(id(parameter) in seen for parameter in unit):
                yield number, [parameter.detach() for parameter in unit]

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        return iter(())

    def _draw(self, modules: list[nn.Module], parameters: list[nn.Parameter]) -> dict[int, Tensor]:
        with _in_memory(parameters) as values:
            before = [dict(module._parameters) for module in modules]
            with torch.no_grad():
                for module in modules:
                    self._initialise(module)
            after = [dict(module._parameters) for module in modules]
            for module, one, other in zip(modules, before, after, strict=True):
                if one.keys() != other.keys() or any(one[name] is not other[name] for name in one):
                    raise ValueError(
                        f"an initialiser must write into the parameters that are there (got weights= that replaced one "
                        f"of {type(module).__name__}); write in place, as torch.nn.init does"
                    )
            for parameter in parameters:
                if parameter.is_meta or torch.isnan(parameter).any():
                    raise ValueError(
                        f"an initialiser must give every parameter numbers (got weights= that left "
                        f"{self._names[id(parameter)]} without, or with NaN); initialise its module too"
                    )
        return values


@contextmanager
def _in_memory(parameters: Sequence[nn.Parameter]) -> Iterator[dict[int, Tensor]]:
    """Gives parameters on the meta device memory, full of NaN; at the end takes it out, and hands it out by their ids.

    They are the same objects throughout, and on the meta device again behind it.
    """
    values: dict[int, Tensor] = {}
    others = []
    try:
        for parameter in parameters:
            memory = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device="cpu")
            other = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            exchange(parameter, other)
            others.append(other)
        yield values
    finally:
        for parameter, other in zip(parameters, others, strict=False):
            exchange(parameter, other)
            values[id(parameter)] = other.detach()


def _visits(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yields what an initialiser sees at a time: all modules of a layer or of a part without layers, children first.

    A module with layers in it comes alone, behind its parts.
    """
    whole = {id(layer) for layer in layers}
    above: set[int] = set()

    def find(module: nn.Module) -> bool:
        if id(module) in whole:
            return True
        if any([find(child) for child in module.children()]):
            above.add(id(module))
        return id(module) in above

    def visit(module: nn.Module) -> Iterator[list[nn.Module]]:
        if id(module) in above:
            for child in module.children():
                yield from visit(child)
            yield [module]
        else:
            yield list(_postorder(module, set()))

    find(model)
    return visit(model)


def _postorder(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _postorder(child, seen)
    yield module


def unless_ignored(model: nn.Module, names: list[str], rule: str) -> list[str]:
    """Returns ``names`` without those that a transformers model's own rule lets pass.

    By the ``rule`` MAY_HOLD they are of tensors that files may hold and the model does not have.
    """
    patterns = list(getattr(model, rule, None) or ())
    if rule == MAY_HOLD:  # buffers that were in files once
        ends = [name for name, _ in model.named_buffers()]
        patterns += [r"rotary_emb\.inv_freq"] if any(n.endswith("rotary_emb.inv_freq") for n in ends) else []
        patterns += [r"(^|\.)position_ids$"] if any(n.endswith("position_ids") for n in ends) else []
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _refuse_meta(model: nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if names:
        raise ValueError(
            f"parameters must have values (those on the meta device are {some(names)}); pass weights= to offload(), a "
            "checkpoint's folder or a function that initialises a module"
        )
    _refuse_meta_buffers(model, [(m, n) for m in model.modules() for n in m._buffers])


def _refuse_meta_buffers(model: nn.Module, buffers: list[tuple[nn.Module, str]]) -> None:
    lacking = {id(buffer) for module, name in buffers if (buffer := module._buffers[name]) is not None}
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) in lacking]
    if names:
        raise ValueError(
            f"buffers must have values (those on the meta device are {some(names)}); build the model with real ones, "
            "as accelerate.init_empty_weights(include_buffers=False) does"
        )
