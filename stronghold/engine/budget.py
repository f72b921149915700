"""Shares out the memory that is there: units that stay on the device, the window, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stronghold.device import Device
from stronghold.errors import BudgetError
from stronghold.optim.states import lay_out_moments
from stronghold.planner.disk_parts import Known, parts_on_disk
from stronghold.planner.model_bytes import ModelBytes, UnitBytes
from stronghold.planner.step_bytes import Buffers, held_on_device, resident_root, spread, update_bytes
from stronghold.settings import STATES, OffloadSettings
from stronghold.store import DISK_BUFFERS, SLOT_BYTES, SLOTS, staging_bytes
from stronghold.unit import Unit
from stronghold.units import format_bytes, format_unequal
from stronghold.window import RING, gradient_slot_bytes

CUT_APART = ", or pass experts_per_part='auto', which cuts a layer's experts apart"
"""How an error ends where that may be its remedy."""
BUFFERS = Buffers(gradient_slots=RING, disk_buffers=DISK_BUFFERS, ring_slots=SLOTS, ring_slot_bytes=SLOT_BYTES)


def model_bytes(
    layers: Sequence[Unit],
    root: Sequence[Unit],
    buffer_bytes: int,
    *,
    is_host: bool,
    accumulates: bool = False,
) -> ModelBytes:
    """Returns what units take that are not placed yet, with sums of several gradients where a step ``accumulates``."""
    return ModelBytes(
        layers=[unit_bytes(unit, accumulates=accumulates) for unit in layers],
        root=[unit_bytes(unit, accumulates=accumulates) for unit in root],
        buffers=buffer_bytes,
        is_host=is_host,
    )


def unit_bytes(unit: Unit, *, accumulates: bool = False) -> UnitBytes:
    weights, indices = unit.layout.total_bytes, unit.gradients.indices
    sums = unit.gradients.sum_bytes() if accumulates else 0
    return UnitBytes(
        weights=weights,
        trained_elements=sum(unit.counts[index] for index in indices),
        slot=unit.slot_bytes,
        remainders=unit.remainder_bytes(),
        gradients=unit.gradients.layout.total_bytes,
        gradient_slot=0 if unit.is_root else gradient_slot_bytes(unit),
        moments={states: lay_out_moments(unit, indices, states).total_bytes for states in STATES},
        is_root=unit.is_root,
        is_copied=unit.has_device_copy,
        on_device=(unit.has_device_copy + unit.trainable) * weights if unit.is_root else 0,
        sums=sums,
        root_gradient=sum(unit.layout.sizes[index] for index in indices) if unit.is_root else 0,
    )


def keep_resident(
    units: Sequence[Unit],
    root: Sequence[Unit],
    root_on_host: Collection[Unit],
    model: ModelBytes,
    settings: OffloadSettings,
    device: Device,
) -> frozenset[int]:
    """Marks the units that stay on the device and returns their numbers; raises ValueError and BudgetError.

    They are the layers that ``settings`` number, then trained root parameters, whose updates the next step waits for,
    but for those ``root_on_host``, and last, with ``"auto"``, as many layers as there is room for beside a window.
    """
    wanted, layers = settings.resident, frozenset[int]()
    if _need_no_slots(settings, device, units):
        wanted = len(units)
    if isinstance(wanted, int):
        if not 0 <= wanted <= len(units):
            raise ValueError(
                f"resident must be between 0 and the number of layers (got resident={wanted}, layers={len(units)}); "
                "pass a smaller number, or 'auto'"
            )
        layers = frozenset(spread(len(units), wanted))
        budget, needed = settings.device_memory, held_on_device(model, 0, layers, BUFFERS)
        if wanted and isinstance(budget, int) and needed > budget:
            takes, given = format_unequal(needed, budget)
            raise BudgetError(
                f"{wanted} resident layers need {takes} on the device with the root and gradient slots, "
                f"before any window and activations (got device_memory={given}); pass a smaller "
                "resident=, or 'auto'"
            )
    limit = settings.device_memory
    if limit is None:
        free = device.free_bytes()
        limit = free // 2 if free is not None else 0  # half is left to activations, whose size depends on the batch
    assert isinstance(limit, int)
    window = settings.window if isinstance(settings.window, int) else 2
    # Where a root parameter is updated, the device or the host, its bits may differ: without a budget no window
    # decides that.
    beside = 2 if settings.device_memory is None else window
    on_host = [len(units) + number for number, unit in enumerate(root) if unit in root_on_host]
    kept = resident_root(model, beside, layers, BUFFERS, limit, on_host)
    if root and not device.is_host:  # of replicas, as many as fit in each
        kept = kept[: root[0].replicas.agree("root parameters", batch=len(kept))[0]]
    if not isinstance(wanted, int):
        numbers = range(len(units), -1, -1)
        layers = next(
            chosen
            for number in numbers
            if held_on_device(model, window, (chosen := frozenset(spread(len(units), number))) | {*kept}, BUFFERS)
            <= limit
            or not number
        )
    for number, unit in enumerate([*units, *root]):
        unit.resident = number in layers or number in kept
    return layers | {*kept}


def _need_no_slots(settings: OffloadSettings, device: Device, units: Sequence[Unit]) -> bool:
    """Whether layers are best computed with where they are: slots would be a second copy in the same memory.

    Replicas have layers in common, but resident ones each for itself.
    """
    bounded = settings.device_memory is not None or settings.host_memory is not None or settings.directories
    asked = (settings.window, settings.resident)
    alone = units[0].replicas.world_size == 1
    return device.is_host and alone and not bounded and (asked == ("auto", 0) or settings.resident == "auto")


def choose_window(
    units: Sequence[Unit], model: ModelBytes, resident: frozenset[int], settings: OffloadSettings, device: Device
) -> int:
    """Returns the number of slots beside what is resident and outside the layers; raises ValueError and BudgetError."""
    slots = [layer.slot for number, layer in enumerate(model.layers) if number not in resident]
    layers, slot, fixed = len(slots), max(slots, default=0), held_on_device(model, 0, resident, BUFFERS)
    budget = settings.device_memory
    assert budget is None or isinstance(budget, int)
    beside = " and resident layers" if layers < len(units) else ""
    needed = f"root, gradient slots{beside} take {format_bytes(fixed)}, each layer of the window {format_bytes(slot)}"
    # As a mixture's experts are, more than one.
    stacked = any(len(shape) == 3 and shape[0] > 1 for unit in units for shape in unit.shapes)
    smaller = CUT_APART if stacked else ""
    if isinstance(settings.window, int):
        window = settings.window
        if not 1 <= window <= len(units):
            raise ValueError(
                f"window must be between 1 and the number of layers (got window={window}, layers={len(units)}); "
                "pass a smaller window, or 'auto'"
            )
        window = min(window, layers)
        if budget is not None and fixed + window * slot > budget:
            fits = (budget - fixed) // slot
            takes, given = format_unequal(fixed + window * slot, budget)
            raise BudgetError(
                f"a window of {window} needs {takes} on the device before activations (got device_memory={given}; "
                f"{needed}); "
                + (
                    f"pass window={fits} or less"
                    if fits >= 1
                    else f"not even a window of 1 fits: raise device_memory{smaller}"
                )
            )
        return window
    if not layers:
        return 0
    if budget is not None and fixed + slot > budget:
        takes, given = format_unequal(fixed + slot, budget)
        raise BudgetError(
            f"a window of 1 needs {takes} on the device before activations (got device_memory={given}; {needed}); "
            "raise device_memory, or use a smaller dtype" + smaller
        )
    limit = budget if budget is not None else device.free_bytes()
    if limit is None:
        return min(2, layers)  # on the CPU slots are a second copy: just enough to overlap
    if settings.resident != "auto" or budget is None:
        limit //= 2
    return max(1, min(layers, (limit - fixed) // slot))


def choose_disk(
    units: Sequence[Unit],
    numbers: Mapping[Unit, int],
    model: ModelBytes,
    resident: frozenset[int],
    settings: OffloadSettings,
) -> None:
    """Marks what of each unit is on disk; ``numbers`` are those of the units in ``model``."""
    budget = settings.host_memory
    assert budget is None or isinstance(budget, int)
    if budget is not None:
        budget = max(0, budget - settings.inputs_host_bytes)
    order, processes = [numbers[unit] for unit in units], units[0].replicas.local_world_size
    known = Known(settings.update == "in_backward", settings.states)
    parts = parts_on_disk(model, order, resident, BUFFERS, budget, processes=processes, known=known)
    for unit in units:
        unit.on_disk = parts.get(numbers[unit], frozenset())


def check_host(units: Sequence[Unit], settings: OffloadSettings, device: Device) -> None:
    """Refuses a host budget that cannot hold the model with the smallest optimizer there is.

    That is 8-bit states, updated in the backward pass; what another one takes, it asks for when it is made.
    """
    budget = settings.host_memory
    if budget is None:
        return
    assert isinstance(budget, int)
    on_host = [unit for unit in units if not unit.resident]
    weights = sum(unit.layout.total_bytes for unit in on_host if unit.lives("weights") == "host")
    weights += sum(unit.remainder_bytes() for unit in on_host if unit.lives("remainders") == "host")
    count = units[0].replicas.local_world_size  # what they have in common each counts a part of
    weights = weights // count + staging_bytes(on_host, device)
    gradients = sum(unit.gradients.layout.total_bytes for unit in on_host if unit.has_device_copy) // count
    gradients += RING * max((unit.gradients.layout.total_bytes for unit in on_host if not unit.is_root), default=0)
    if settings.accumulates:
        layers = [unit for unit in on_host if not unit.is_root]
        gradients += sum(unit.gradients.layout.total_bytes + unit.gradients.sum_bytes() for unit in layers) // count
        gradients += sum(unit.gradients.sum_bytes() for unit in on_host if unit.is_root)
    smallest = "states='8bit'" + ("" if settings.accumulates else " and update='in_backward'")
    trained = [unit for unit in on_host if unit.trainable]
    in_memory = [unit for unit in trained if unit.lives("moments") == "host"]
    states = sum(lay_out_moments(unit, unit.gradients.indices, "8bit").total_bytes for unit in in_memory) // count
    ring = BUFFERS.ring(max((update_bytes(unit_bytes(unit), unit.on_disk, "8bit") for unit in trained), default=0))
    total = weights + gradients + states + ring + settings.inputs_host_bytes
    inputs = f", layers' inputs {format_bytes(settings.inputs_host_bytes)}" if settings.inputs_host_bytes else ""
    if total > budget:
        needed, given = format_unequal(total, budget)
        raise BudgetError(
            f"host memory must hold {needed} (got host_memory={given}): weights {format_bytes(weights)}{inputs}, "
            f"gradients {format_bytes(gradients)} and AdamW's states {format_bytes(states + ring)}, with {smallest}"
            "; raise host_memory, freeze parameters, or train a smaller model"
        )
