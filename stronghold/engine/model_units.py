"""Shares out the parameters of a model into units, before anything is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.engine.experts_part import ExpertsPart
from stronghold.engine.find_layers import Layer, find_layers
from stronghold.engine.parameters import check_memory_is_their_own, check_parameters
from stronghold.formats.kept_in_fp32 import computes_in, mark_kept_in_fp32
from stronghold.unit import Unit, all_parameters, is_packed, parameters_and_owners

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
FEW = 1 / 8
"""What is trained of a layer stays on the device if it is at most this share of the layer's elements."""
Owner = tuple[nn.Module, str]


@dataclass(frozen=True, kw_only=True)
class ModelUnits:
    """The parameters of a model by units.

    ``units`` are all units in the order of the model's parameters, which is about the order of their first use and
    the order of their updates; ``layers`` those of the layers, and ``modules`` the layers themselves, in the order of
    the rows; ``root`` the root parameters with the modules that own them. ``beside`` are, by the number of the layer,
    the trained parameters of a layer that is frozen but for these: units of the root, in ``root`` too.
    """

    units: list[Unit]
    layers: list[Unit]
    modules: list[nn.Module]
    root: list[tuple[Unit, list[Owner]]]
    beside: dict[int, Unit]
    buffers: list[Owner]

    @property
    def buffer_bytes(self) -> int:
        """What the model's buffers take, which go to the device."""
        buffers = (module._buffers[name] for module, name in self.buffers)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)


def units_of(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    alignment: int,
    *,
    apart: bool,
    in_pieces: bool,
) -> ModelUnits:
    """Shares out the parameters of ``model``, in memory or on the meta device; changes none of them.

    A parameter that one layer alone uses goes with that layer; what layers share, with one another or with the rest of
    the model, is a root parameter, as is everything outside the layers. So is what is trained of a layer that is frozen
    but for a little, such as adapters: an update makes nothing else stale. ``apart`` tells that the device has memory
    of its own, ``in_pieces`` that layers are to run over micro-batches. Raises ValueError for a model that cannot be.
    """
    check_parameters(model)
    found = find_layers(model, layers)
    check_memory_is_their_own(model)
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype must be torch.float32 or torch.bfloat16 (got {dtype}); for float16 use torch.bfloat16, which needs "
            "no loss scaling"
        )
    if in_pieces:
        check_micro_batch(found)
    mark_kept_in_fp32(model)
    owned, root = share_out(model, found)
    units_by_parameter: dict[int, Unit] = {}
    modules: list[nn.Module] = []
    layer_units: list[Unit] = []
    root_units: list[tuple[Unit, list[Owner]]] = []
    beside: dict[int, Unit] = {}
    for layer, parameters in zip(found, owned, strict=True):
        if not parameters:
            continue
        number, trained = len(modules), _few_trained(parameters)
        if trained:
            dtypes = dtypes_of(layer.name, trained, dtype)
            name = f"{layer.name} (trained)"
            unit = beside[number] = Unit(None, name, trained, dtypes, has_device_copy=apart, alignment=alignment)
            root_units.append((unit, []))  # the layer's block looks after the modules that own them
            units_by_parameter.update((id(p), unit) for p in trained)
            parameters = [p for p in parameters if id(p) not in units_by_parameter]
        unit = Unit(number, layer.name, parameters, dtypes_of(layer.name, parameters, dtype), alignment=alignment)
        modules.append(layer.module)
        layer_units.append(unit)
        units_by_parameter.update((id(p), unit) for p in parameters)
    if not modules:
        raise ValueError(
            f"every parameter of the {len(found)} layers of {type(model).__name__} is shared with other layers or the "
            "rest of the model, so that nothing can be moved by itself: there is nothing to offload"
        )
    for name, parameter, owners in root:
        dtypes = dtypes_of(name, [parameter], dtype)
        unit = Unit(None, name, [parameter], dtypes, has_device_copy=apart, alignment=alignment)
        units_by_parameter[id(parameter)] = unit
        root_units.append((unit, owners))
    units = list({id(h): h for _, p in all_parameters(model) if (h := units_by_parameter[id(p)])}.values())
    buffers = [(m, name) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    return ModelUnits(units=units, layers=layer_units, modules=modules, root=root_units, beside=beside, buffers=buffers)


def _few_trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Returns what is trained of a layer, if that is little of it: none where it is much, or all is frozen."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in parameters)
    return trained if sum(parameter.numel() for parameter in trained) <= FEW * elements else []


def check_micro_batch(layers: Sequence[Layer]) -> None:
    """Refuses layers whose samples cannot be told apart, or depend on one another."""
    for layer in layers:
        if isinstance(layer.module, ExpertsPart):
            raise ValueError(
                "micro_batch cuts the first dimension of a layer's input, which must be the batch (got the experts' "
                f"part {layer.name}, whose rows are tokens); offload without micro_batch, or do not split the experts"
            )
        for name, module in layer.module.named_modules(prefix=layer.name):
            if getattr(module, "batch_first", True) is False:
                raise ValueError(
                    f"micro_batch cuts the first dimension of a layer's input, which must be the batch (got "
                    f"batch_first=False in {name}, {type(module).__name__}, of which it is the sequence); build it "
                    "with batch_first=True, or offload without micro_batch, also where the layer transposes for it"
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"micro_batch must not change what a layer computes (got {type(module).__name__} in {name}, which "
                    "depends on all samples at once); use a LayerNorm or GroupNorm, or offload without micro_batch"
                )


def share_out(
    model: nn.Module, layers: Sequence[Layer]
) -> tuple[list[list[nn.Parameter]], list[tuple[str, nn.Parameter, list[Owner]]]]:
    """Returns each layer's own parameters, and the root parameters with their names and owners."""
    users_of = _users(model, layers)
    owned: list[list[nn.Parameter]] = [[] for _ in layers]
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    root = []
    for name, parameter, whole in parameters_and_owners(model):
        users = set().union(*(users_of[id(module)] for module, _ in owners[id(whole)]))
        layer = users.pop()
        if layer is None or users:
            root.append((name, parameter, owners.get(id(parameter), [])))
        else:
            owned[layer].append(parameter)
    return owned, root


def _users(model: nn.Module, layers: Sequence[Layer]) -> dict[int, set[int | None]]:
    """Returns, by the id of every module, the layers that it is a part of, and None where it is used outside them."""
    users: dict[int, set[int | None]] = {}
    for i, layer in enumerate(layers):
        for module in layer.module.modules():
            users.setdefault(id(module), set()).add(i)
    within = {id(layer.module) for layer in layers}
    outside = [model]
    while outside:
        module = outside.pop()
        known = users.setdefault(id(module), set())
        if None not in known:
            known.add(None)
            outside += [child for child in module.children() if id(child) not in within]
    return users


def dtypes_of(
    name: str, parameters: Sequence[nn.Parameter], wanted: torch.dtype | None
) -> torch.dtype | list[torch.dtype]:
    """Returns what the parameters of one unit compute in: what is ``wanted``, or each in its own.

    What transformers keeps in fp32 beside bf16 stays so.
    """
    if wanted is not None:
        return [parameter.dtype if is_packed(parameter) else computes_in(parameter, wanted) for parameter in parameters]
    present = {parameter.dtype for parameter in parameters if not is_packed(parameter)}
    if not present <= set(COMPUTE_DTYPES):
        raise ValueError(
            f"parameters must be float32 or bfloat16 (got {', '.join(sorted(map(str, present)))} in {name}); pass "
            "dtype=torch.bfloat16 or torch.float32 to offload()"
        )
    return [parameter.dtype for parameter in parameters]
