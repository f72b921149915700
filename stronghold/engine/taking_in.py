"""What is added to a model that is offloaded, such as PEFT's adapters: it becomes units of the root."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from stronghold.engine.budget import unit_bytes
from stronghold.engine.find_layers import Layer
from stronghold.engine.model_units import Owner, dtypes_of, share_out
from stronghold.engine.parameters import check_memory_is_their_own, check_parameters
from stronghold.errors import BudgetError
from stronghold.unit import Unit, all_parameters, unit_of

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine

live: weakref.WeakSet[Engine] = weakref.WeakSet()
"""The engines that there are: a parameter that was added to a model does not know of any."""


@dataclass(frozen=True)
class Additions:
    """New units with the modules that own their parameters, and new buffers.

    ``beside`` are those units that hold the new parameters of one layer, by its number; they are in ``root`` too.
    ``root_bytes`` is what all buffers take on the device, and all root parameters that are not resident. ``order`` are
    the ids of all parameters of the model.
    """

    order: list[int]
    root: list[tuple[Unit, list[Owner]]] = field(default_factory=list)
    beside: dict[int, Unit] = field(default_factory=dict)
    buffers: list[Owner] = field(default_factory=list)
    root_bytes: int = 0

    @property
    def units(self) -> list[Unit]:
        return [unit for unit, _ in self.root]

    def in_order(self, units: Sequence[Unit]) -> list[Unit]:
        """Returns ``units`` in the order of the model's parameters."""
        unit_of = {id(parameter): unit for unit in units for parameter in unit.parameters}
        return list({unit_of[one]: None for one in self.order})


def take_in_new(parameters: Iterable[object]) -> None:
    """Has those engines take in what was added to their models to which new ones of ``parameters`` belong.

    ``parameters`` are those of a group: pairs of a name and a parameter, too. Raises what ``take_in_additions`` raises,
    and OffloadedModelError where something else of such a model has changed.
    """
    given = (one[1] if isinstance(one, tuple) else one for one in parameters)
    new = {id(one) for one in given if isinstance(one, nn.Parameter) and unit_of(one) is None}
    for engine in [*live] if new else ():
        model = None if engine.closed else engine.model()
        if model is not None and not new.isdisjoint(map(id, model.parameters())):
            engine.refuse_changes()
            unmark_quantised(model)


def unmark_quantised(model: nn.Module | None) -> None:
    """Takes away transformers' marks that weights of ``model`` are in four or eight bits, once PEFT has its adapters.

    PEFT reads them when it makes its layers. TRL's trainers read them later and round every parameter that trains to
    bf16 for them, with which the adapters would be other ones than their optimizer has.
    """
    modules = [] if model is None else [*model.modules()]
    for module in modules if any("peft_config" in vars(one) for one in modules) else ():
        for bits in (4, 8):
            vars(module).pop(f"is_loaded_in_{bits}bit", None)


def take_in_additions(engine: Engine) -> bool:
    """Takes in what was added to the model of ``engine``; returns whether nothing else of it has changed.

    A layer must still have all of its parameters, wherever in it, and the model those of the root. Not of a model that
    several processes train, in which each would have added its own. What is on the meta device waits for its values, or
    for others in its place, as PEFT's EVA makes them. Where no optimizer is left, what is frozen by now gives back what
    it had for its training, but for remainders that training has written. Raises BudgetError and ValueError for
    parameters that cannot be taken in, and nothing has changed.
    """
    model = engine.model()
    if model is None or engine.replicas.world_size > 1 or engine.processes.world_size > 1:
        return False
    layers = [Layer(block.unit.name, block.module) for block in engine.blocks]
    if len(layers) != len(engine.layers):  # the model has given some up
        return False
    there = {id(parameter) for _, parameter in all_parameters(model)}
    within = [{id(parameter) for _, parameter in all_parameters(layer.module)} for layer in layers]
    if not _all_there(engine, there, within):
        return False
    added = _found(engine, model, layers)
    for unit in added.units:
        unit.belong_to(engine, engine.waits, engine.close_backward, engine.turns.taken)
        engine.store.take_in(unit)
        engine.store.place(unit)
    engine.take_in(model, added)
    for unit in engine.units:
        if not unit.trainable and engine.own_optimizer is None:  # one that has trained it may do so again
            unit.keep_weights_alone()
    engine.gradients.grad_offload.give_back()
    engine.store.give_back(engine.units)
    return True


def _all_there(engine: Engine, there: set[int], within: Sequence[set[int]]) -> bool:
    known = {id(parameter) for unit in engine.units for parameter in unit.parameters}
    own = all({*map(id, unit.parameters)} <= ids for unit, ids in zip(engine.layers, within, strict=True))
    return own and known <= there


def _found(engine: Engine, model: nn.Module, layers: Sequence[Layer]) -> Additions:
    """Makes units of what the model has that the engine does not know of."""
    known = {id(parameter) for unit in engine.units for parameter in unit.parameters}
    known |= {id(parameter) for parameter in model.parameters() if parameter.is_meta}
    check_parameters(model, known)
    check_memory_is_their_own(model)
    owned, root = share_out(model, layers)
    alignment, apart = engine.layers[0].alignment, not engine.device.is_host
    units: list[tuple[Unit, list[Owner]]] = []
    beside: dict[int, Unit] = {}
    for number, (layer, parameters) in enumerate(zip(layers, owned, strict=True)):
        if new := [parameter for parameter in parameters if id(parameter) not in known]:
            count = sum(unit.name.partition(" (")[0] == layer.name for unit in engine.units)
            name = f"{layer.name} (added {count})" if count > 1 else f"{layer.name} (added)"
            unit = Unit(None, name, new, dtypes_of(layer.name, new, None), has_device_copy=apart, alignment=alignment)
            beside[number] = unit
            units.append((unit, []))
    for name, parameter, owners in root:
        if id(parameter) not in known:
            dtypes = dtypes_of(name, [parameter], None)
            unit = Unit(None, name, [parameter], dtypes, has_device_copy=apart, alignment=alignment)
            units.append((unit, owners))
    for unit, _ in units:
        unit.replicas = engine.replicas
        unit.resident = apart and unit.trainable and _fits(engine, unit)
    device = engine.device.torch_device
    buffers = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device != device and not buffer.is_meta
    ]
    root_units = [*(unit for unit in engine.units if unit.is_root), *(unit for unit, _ in units)]
    taken = sum(buffer.nbytes for buffer in model.buffers() if not buffer.is_meta)
    taken += sum(unit_bytes(unit).on_device for unit in root_units if not unit.resident)
    more = max(0, taken - engine.held.root_bytes)
    on_host = sum(unit.layout.total_bytes + unit.remainder_bytes() for unit, _ in units if not unit.resident)
    engine.budget.check_budgets(host_bytes=on_host, device_bytes=more, what="what was added to the model")
    order = [id(p) for _, p in all_parameters(model) if not p.is_meta]
    return Additions(order, units, beside, buffers, taken)


def _fits(engine: Engine, unit: Unit) -> bool:
    """Whether the device has room for a unit with its gradients and states: half of what is free, without a budget."""
    needed, free = unit_bytes(unit).resident(), engine.device.free_bytes()
    try:
        engine.budget.check_budgets(host_bytes=0, device_bytes=needed, what=unit.name)
    except BudgetError:
        return False
    return free is None or needed <= free // 2
