"""The least that a step can take, by sums alone: what a search asks before it plays a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stronghold.planner.disk_play import CHUNK_BYTES
from stronghold.planner.host_work import issued_s
from stronghold.planner.issued_inputs import SLOTS
from stronghold.planner.issued_inputs import STAGING as INPUT_STAGING
from stronghold.planner.program import Kind
from stronghold.planner.step_costs import LayerWork, Machine, Resource, RootWork, StepSettings, UnitWork


class StepBound(NamedTuple):
    """No step takes less than ``step_s``; ``resource`` is what has to be relieved first for it to be less."""

    step_s: float
    resource: Resource


def step_bound(
    layers: Sequence[LayerWork], machine: Machine, settings: StepSettings, root: Sequence[RootWork] = ()
) -> StepBound:
    """Returns a lower bound of a steady step, from what each resource has to do in each pass.

    The backward pass ends when all gradients are on the host, and under ``in_backward`` all layers are updated; so the
    passes do not overlap, and each is as long as what its longest resource does within it, with what must go before and
    come behind. When updates are deferred, each trained layer is updated and fetched within the forward pass; else
    ``window`` of them are fetched before it. Root parameters that are used first and updated on the host come down, are
    updated and go up before what they are used in is computed, and deferred updates of layers are behind them. All but
    ``window`` of the layers, frozen ones among them, are fetched within each pass: behind the computation of the first
    one that is not resident, for only then a slot is free, and before that of the last one. A window of one does not
    fetch while it computes. Inputs that wait beside the device go down in the forward pass, where a layer computes when
    a slot is free, and come up in the backward pass, each before its layer. Beyond that no resource does more than a
    second's work in a second of the step. Of several passes each that is not the first goes from one backward pass's
    end to the next one's.
    """
    if settings.passes > 1:
        first = step_bound(layers, machine, replace(settings, passes=1), root)
        others_s, resource = _pass_bound(layers, machine, settings, root)
        others_s *= settings.passes - 1
        return StepBound(first.step_s + others_s, resource if others_s > first.step_s else first.resource)
    resident, window = frozenset(settings.resident), settings.window
    streamed = [layer for number, layer in enumerate(layers) if number not in resident]
    trained = [layer for layer in streamed if layer.elements]
    units: list[UnitWork] = [*layers, *root]
    h2d = machine.h2d_bytes_per_s
    fetches_s = sorted(machine.copy_s + layer.weight_bytes / h2d for layer in streamed)
    first_s = sorted(machine.copy_s + layer.weight_bytes / h2d for layer in trained)
    again_s = sum(fetches_s[: len(streamed) - window]) if window < len(streamed) else 0.0
    gradients_s = [machine.down_s(layer.gradient_bytes) for layer in trained]
    updates_s = sum(_update_s(layer, machine) for layer in trained)
    on_host = [one for one in root if not one.resident]
    layers_s = sum(machine.on_device_s(layers[number]) for number in resident)
    # In the optimizer's step the device updates beside the host; of what is used first, each waits for its own update.
    first_updates_s, computed_s = 0.0, sum(machine.on_device_s(one) for one in root if one.resident)
    if not settings.in_backward:
        computed_s += layers_s
    for one in root:
        if not one.first:
            continue
        if one.elements and not one.resident:
            first_updates_s = max(first_updates_s, machine.down_s(one.gradient_bytes)) + _update_s(one, machine)
            computed_s = max(computed_s, first_updates_s + machine.up_s(one.weight_bytes))
        computed_s += one.forward_s
    behind: list[UnitWork] = [*layers, *(one for one in root if not one.first)]
    forward = {Resource.COMPUTE: computed_s + sum(unit.forward_s for unit in behind)}
    backward = {
        Resource.COMPUTE: sum(unit.backward_s for unit in units) + (layers_s if settings.in_backward else 0.0),
        Resource.GRADIENTS: sum(gradients_s),
        Resource.FETCHES: again_s,
    }
    if trained:
        last, last_fetch_s = trained[-1], machine.copy_s + trained[-1].weight_bytes / h2d
        backward[Resource.GRADIENTS] += last.backward_s
        if settings.in_backward:
            backward[Resource.UPDATES] = last.backward_s + gradients_s[-1] + updates_s
        else:
            forward[Resource.UPDATES] = first_updates_s + updates_s + last_fetch_s + last.forward_s
    if trained and trained[0] is layers[0]:  # its gradients come when all is computed
        backward[Resource.COMPUTE] += gradients_s[0]
    forward[Resource.FETCHES] = sum(first_s[: max(0, len(trained) - window) if settings.in_backward else None])
    if window < len(streamed):
        ends = streamed[0], streamed[-1]
        for each, ends_s in (
            (forward, sum(layer.forward_s for layer in ends)),
            (backward, sum(layer.backward_s for layer in ends)),
        ):
            each[Resource.FETCHES] = max(each[Resource.FETCHES], again_s + (ends_s if window > 1 else 0.0))
    if window == 1:
        forward[Resource.FETCHES] += sum(layer.forward_s for layer in streamed)
        backward[Resource.FETCHES] += sum(layer.backward_s for layer in streamed)
    kept = [layer for layer in layers if layer.input_bytes]
    down_s, up_s = (
        [settings.pieces * machine.copy_s + layer.input_bytes / rate for layer in kept]
        for rate in (machine.d2h_bytes_per_s, h2d)
    )
    back_s = 0.0
    if kept:
        forward[Resource.GRADIENTS] = sum(down_s[:-SLOTS]) + kept[-1].forward_s
        last_s = min(one.backward_s for one in (kept[0], *streamed[: bool(again_s)]))  # behind the last of them all
        backward[Resource.FETCHES] = max(backward[Resource.FETCHES], sum(up_s) + again_s + last_s)
        # The last one's inputs come up when all are down.
        back_s = up_s[-1] + sum(layer.backward_s for layer in kept)
    read, write = machine.disk_read_bytes_per_s, machine.disk_write_bytes_per_s
    ring_bytes = sum(layer.ring_bytes for layer in trained) + sum(one.ring_bytes for one in on_host)
    reads_s = sorted(layer.weight_bytes / read for layer in trained if layer.on_disk)
    inputs = sorted(layer.input_bytes for layer in layers if layer.inputs_on_disk and layer.input_bytes)
    inputs_s = sum(inputs) / write + sum(inputs[:-INPUT_STAGING]) / read  # the last ones are in staging still
    whole = {
        Resource.HOST: _issued_s(layers, machine, settings) if machine.runs_behind else 0.0,
        Resource.FETCHES: max(sum(first_s), again_s) + again_s + sum(up_s),
        Resource.GRADIENTS: sum(down_s) + max(sum(gradients_s), back_s),
        Resource.UPDATES: updates_s + sum(_update_s(one, machine) for one in on_host),
        Resource.DISK: ring_bytes / read + ring_bytes / write + sum(reads_s) + inputs_s,
    }
    longest_s, resource = max((seconds, one) for one, seconds in whole.items())
    in_passes = [max((seconds, one) for one, seconds in each.items()) for each in (forward, backward)]
    if (passes_s := sum(seconds for seconds, _ in in_passes)) < longest_s:
        return StepBound(longest_s, resource)
    # What is longer than the computation beside it holds the step up; of two passes, the one that it holds up more.
    held_up = [
        seconds - each[Resource.COMPUTE] for (seconds, _), each in zip(in_passes, (forward, backward), strict=True)
    ]
    return StepBound(passes_s, in_passes[held_up.index(max(held_up))][1])


def _pass_bound(
    layers: Sequence[LayerWork], machine: Machine, settings: StepSettings, root: Sequence[RootWork]
) -> StepBound:
    """Returns the same of a pass behind another one.

    It is like a step of layers that are updated in the backward pass: the host adds each one's gradients to those that
    it has, when these are down, and no layer in the window has to be fetched again.
    """
    resident = frozenset(settings.resident)
    kinds: dict[tuple[int, bool], LayerWork] = {}  # a search asks for many bounds, and layers are of few kinds
    keys = [(id(one), number in resident) for number, one in enumerate(layers)]
    for one, key in zip(layers, keys, strict=True):
        if key not in kinds:
            add_s = one.add_s if key[1] and one.elements else 0.0
            nothing = {"on_disk": False, "ring_bytes": 0, "matrices": 0, "iteration_s": 0.0}
            kinds[key] = replace(one, backward_s=one.backward_s + add_s, **nothing)  # type: ignore[arg-type]
    return step_bound(
        [kinds[key] for key in keys],
        replace(
            machine,
            host_update_ns=machine.host_add_ns,
            device_update_ns=0.0,
            host_work=replace(machine.host_work, update_s=0.0),
        ),
        replace(settings, passes=1, in_backward=True),
        # Root parameters' gradients are added up while those of the first layer are on their way.
        [RootWork(first=one.first, forward_s=one.forward_s, backward_s=one.backward_s) for one in root],
    )


def _issued_s(layers: Sequence[LayerWork], machine: Machine, settings: StepSettings) -> float:
    """Returns what issuing all layers takes."""
    of_all = frozenset(settings.resident)
    alike = [(number in of_all, layer.recomputed, layer.elements > 0) for number, layer in enumerate(layers)]
    one_of = dict(zip(alike, layers, strict=True))  # a search asks for many bounds, and layers are of few kinds
    seconds = 0.0
    for key, count in Counter(alike).items():
        resident, _, trained = key
        kinds = [Kind.LAUNCH, Kind.LAUNCH_BACKWARD, *([Kind.LAUNCH_UPDATE] if resident and trained else [])]
        seconds += count * sum(issued_s(kind, one_of[key], machine, settings, resident=resident) for kind in kinds)
    return seconds


def _update_s(unit: UnitWork, machine: Machine) -> float:
    """Returns what a unit's update keeps the next one waiting for at the least."""
    if 0 < unit.ring_bytes <= CHUNK_BYTES:  # one chunk: the next update goes on beside this one's iterations
        first_s, _, others_s, last_s = machine.parts_s(unit)
        return first_s + others_s + last_s
    return machine.update_s(unit)
