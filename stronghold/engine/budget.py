"""Shares out the memory that is there: units that stay on the device, the window, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stronghold.device import Device
from stronghold.errors import BudgetError
from stronghold.optim.states import lay_out_moments
from stronghold.settings import STATES, OffloadSettings
from stronghold.store import RING_BYTES, staging_bytes
from stronghold.unit import Kind, Unit
from stronghold.units import format_bytes
from stronghold.window import RING, gradient_slot_bytes

_STATES: frozenset[Kind] = frozenset(("remainders", "moments"))


def spread(layers: int, resident: int) -> list[int]:
    """Returns which of ``layers`` stay on the device: the first, and the others evenly behind it.

    The first layer is updated last and needed first; and between two resident layers the link has their computation's
    time for the next one. ``spread(8, 3)`` is ``[0, 2, 5]``.
    """
    return [i * layers // resident for i in range(resident)]


def resident_bytes(unit: Unit) -> int:
    """Returns what a resident unit takes on the device: weights, remainders, gradients and fp32 moments."""
    states = _moment_bytes(unit)
    return unit.layout.total_bytes + unit.remainder_bytes() + unit.gradients.layout.total_bytes + states


def root_bytes(root: Sequence[Unit]) -> int:
    """Returns what root parameters take on the device: of each its copy and its gradient, or all if it is resident."""
    return sum(
        resident_bytes(unit) if unit.resident else (unit.has_device_copy + unit.trainable) * unit.layout.total_bytes
        for unit in root
    )


def keep_resident(
    units: Sequence[Unit],
    root: Sequence[Unit],
    root_on_host: Collection[Unit],
    buffer_bytes: int,
    settings: OffloadSettings,
    device: Device,
) -> None:
    """Marks the units that stay on the device; raises ValueError and BudgetError.

    They are the layers that ``settings`` number, then trained root parameters, whose updates the next step waits for,
    but for those ``root_on_host``, and last, with ``"auto"``, as many layers as there is room for beside a window.
    """
    wanted = settings.resident
    if _need_no_slots(settings, device, units):
        wanted = len(units)
    if isinstance(wanted, int):
        if not 0 <= wanted <= len(units):
            raise ValueError(
                f"resident must be between 0 and the number of layers (got resident={wanted}, layers={len(units)}); "
                "pass a smaller number, or 'auto'"
            )
        _mark(units, wanted)
        budget, needed = settings.device_memory, _fixed_bytes(units, buffer_bytes + root_bytes(root))
        if wanted and isinstance(budget, int) and needed > budget:
            raise BudgetError(
                f"{wanted} resident layers need {format_bytes(needed)} on the device with the root and gradient slots, "
                f"before any window and activations (got device_memory={format_bytes(budget)}); pass a smaller "
                "resident=, or 'auto'"
            )
    limit = settings.device_memory
    if limit is None:
        free = device.free_bytes()
        limit = free // 2 if free is not None else 0  # half is left to activations, whose size depends on the batch
    assert isinstance(limit, int)

    def fits(window: int) -> bool:
        streamed = [unit for unit in units if not unit.resident]
        slots = min(window, len(streamed)) * _longest(streamed)
        return _fixed_bytes(units, buffer_bytes + root_bytes(root)) + slots <= limit

    window = settings.window if isinstance(settings.window, int) else 2
    if not device.is_host:
        # Where a root parameter is updated, the device or the host, its bits may differ: without a budget no window
        # decides that.
        beside = 2 if settings.device_memory is None else window
        _keep_root([unit for unit in root if unit.trainable and unit not in root_on_host], lambda: fits(beside))
    if isinstance(wanted, int):
        return
    for number in range(len(units), -1, -1):
        _mark(units, number)
        if number == 0 or fits(window):
            return


def _keep_root(root: Sequence[Unit], fits: Callable[[], bool]) -> None:
    """Marks the first root parameters as resident, as many as fit; of replicas, as many as fit in each."""

    def mark(number: int) -> None:
        for place, unit in enumerate(root):
            unit.resident = place < number

    number = len(root)
    mark(number)
    while number and not fits():
        number -= 1
        mark(number)
    if root:
        number, _ = root[0].replicas.agree("root parameters", batch=number)
        mark(number)


def _need_no_slots(settings: OffloadSettings, device: Device, units: Sequence[Unit]) -> bool:
    """Whether layers are best computed with where they are: slots would be a second copy in the same memory.

    Replicas have layers in common, but resident ones each for itself.
    """
    bounded = settings.device_memory is not None or settings.host_memory is not None or settings.directories
    asked = (settings.window, settings.resident)
    alone = units[0].replicas.world_size == 1
    return device.is_host and alone and not bounded and (asked == ("auto", 0) or settings.resident == "auto")


def choose_window(units: Sequence[Unit], outside_bytes: int, settings: OffloadSettings, device: Device) -> int:
    """Returns the number of slots beside what root parameters and buffers take; raises ValueError and BudgetError."""
    streamed = [unit for unit in units if not unit.resident]
    layers, slot, fixed = len(streamed), _longest(streamed), _fixed_bytes(units, outside_bytes)
    budget = settings.device_memory
    assert budget is None or isinstance(budget, int)
    resident = " and resident layers" if layers < len(units) else ""
    needed = f"root, gradient slots{resident} take {format_bytes(fixed)}, each layer of the window {format_bytes(slot)}"
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
            raise BudgetError(
                f"a window of {window} needs {format_bytes(fixed + window * slot)} on the device before activations "
                f"(got device_memory={format_bytes(budget)}; {needed}); "
                + (f"pass window={fits} or less" if fits >= 1 else "not even a window of 1 fits: raise device_memory")
            )
        return window
    if not layers:
        return 0
    if budget is not None and fixed + slot > budget:
        raise BudgetError(
            f"a window of 1 needs {format_bytes(fixed + slot)} on the device before activations (got "
            f"device_memory={format_bytes(budget)}; {needed}); raise device_memory, or use a smaller dtype"
        )
    limit = budget if budget is not None else device.free_bytes()
    if limit is None:
        return min(2, layers)  # on the CPU slots are a second copy: just enough to overlap
    if settings.resident != "auto" or budget is None:
        limit //= 2
    return max(1, min(layers, (limit - fixed) // slot))


def choose_disk(units: Sequence[Unit], settings: OffloadSettings, device: Device) -> None:
    """Marks what of each unit is on disk: all but the root parameters' weights, or what ``host_memory`` does not hold.

    Weights are the first to stay in host memory, as a step reads them there three times and writes them once; then the
    remainders and moments, layer by layer, which an update reads and writes once. Gradients come first of all, as if
    none were used up in the backward pass, where they fit.
    """
    on_host = [unit for unit in units if not unit.resident]
    for unit in on_host:
        unit.on_disk = _STATES if unit.is_root else _STATES | {"weights"}
    budget = settings.host_memory
    if not isinstance(budget, int):
        return
    layers = [unit for unit in on_host if not unit.is_root]
    count = units[0].replicas.local_world_size  # what they have in common each counts a part of
    room = count * (budget - RING_BYTES - RING * max((h.gradients.layout.total_bytes for h in layers), default=0))
    room -= sum(unit.gradients.layout.total_bytes for unit in on_host)
    room -= sum(unit.layout.total_bytes for unit in on_host if unit.is_root)
    if sum(unit.layout.total_bytes for unit in layers) > room:  # some weights will be on disk
        room -= count * staging_bytes(layers, device)
    for part in (frozenset({"weights"}), _STATES):
        for unit in layers if "weights" in part else on_host:
            size = unit.layout.total_bytes if "weights" in part else unit.remainder_bytes() + _most_moment_bytes(unit)
            if size <= room:
                unit.on_disk -= part
                room -= size


def _most_moment_bytes(unit: Unit) -> int:
    """Returns what moments may take, whichever their format: of small tensors each array takes whole pages."""
    return max(lay_out_moments(unit, unit.gradients.indices, states).total_bytes for states in STATES)


def _moment_bytes(unit: Unit) -> int:
    return lay_out_moments(unit, unit.gradients.indices, "fp32").total_bytes


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
    in_memory = [unit for unit in on_host if unit.lives("moments") == "host"]
    states = sum(lay_out_moments(unit, unit.gradients.indices, "8bit").total_bytes for unit in in_memory) // count
    ring = RING_BYTES if len(in_memory) < len(on_host) else 0
    total = weights + gradients + states + ring
    if total > budget:
        raise BudgetError(
            f"host memory must hold {format_bytes(total)} (got host_memory={format_bytes(budget)}): weights "
            f"{format_bytes(weights)}, gradients {format_bytes(gradients)} and AdamW's states "
            f"{format_bytes(states + ring)}, with states='8bit' and update='in_backward'; raise host_memory, freeze "
            "parameters, or train a smaller model"
        )


def _mark(units: Sequence[Unit], resident: int) -> None:
    chosen = set(spread(len(units), resident))
    for layer, unit in enumerate(units):
        unit.resident = layer in chosen


def _fixed_bytes(units: Sequence[Unit], outside_bytes: int) -> int:
    """Returns what gradient slots and resident layers take on the device beside what is outside the layers."""
    streamed = [unit for unit in units if not unit.resident]
    slots = RING * max(map(gradient_slot_bytes, streamed), default=0)
    return outside_bytes + slots + sum(resident_bytes(unit) for unit in units if unit.resident)


def _longest(units: Sequence[Unit]) -> int:
    return max((unit.slot_bytes for unit in units), default=0)
