"""Which operators of a stage to recompute, so that it fits in the device's memory for the fewest seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from stronghold.planner.profiled.operator_plan import OperatorStage
from stronghold.planner.profiled.predict import held_bytes, stage_costs
from stronghold.planner.profiled.profile import Costs, Profile
from stronghold.planner.profiled.segments import Corner, OperatorSegment, corners, cuts

CAPS = (1.0, 0.6, 0.35, 0.2)
"""How large a run may be, as a part of the largest segment: smaller ones save less and need less room to come back."""
cached_corners = lru_cache(maxsize=20000)(corners)


def segment_starts(profile: Profile) -> list[tuple[int, bool]]:
    """Returns where the segments of the whole model begin, and whether a block does; :func:`segments.cuts` says how."""
    names, rows = profile.operators, profile.rows
    firsts = {begin for begin, _ in profile.family.repeated} | {end for _, end in profile.family.repeated}
    return cuts([profile.family.begins(name) for name in names], [row in firsts for row in rows])


def with_room(
    profile: Profile,
    starts: Sequence[tuple[int, bool]],
    stage: OperatorStage,
    micro_batch: int,
    behind: int,
    memory_bytes: float,
) -> OperatorStage | None:
    """Returns the stage with the fewest seconds of recomputation found for which it fits, None where none does."""
    names = profile.operators[stage.begin : stage.end]
    costs = stage_costs(profile, stage.begin, stage.choices, micro_batch)
    held = held_bytes(profile, names, costs)
    lacking = fixed_bytes(profile, costs) + (costs[0].input_bytes + sum(held)) * (behind + 1) - memory_bytes
    nothing = tuple(False for _ in costs)
    if lacking <= 0:
        return OperatorStage(begin=stage.begin, devices=stage.devices, choices=stage.choices, recomputed=nothing)
    pieces = list(_pieces(profile, starts, stage, held, costs))
    largest = max(sum(segment.held_bytes) for _, segment in pieces)
    best: tuple[float, list[Corner]] | None = None
    for cap in CAPS:
        curves = [cached_corners(segment, cap * largest) for _, segment in pieces]
        chosen = cheapest(curves, lacking, behind)
        if chosen is not None and (best is None or sum(one.seconds for one in chosen) < best[0]):
            best = sum(one.seconds for one in chosen), chosen
    if best is None:
        return None
    recomputed = list(nothing)
    for (begin, segment), corner in zip(pieces, best[1], strict=True):
        for number in range(len(segment.held_bytes)):
            recomputed[begin - stage.begin + number] = bool(corner.operators >> number & 1)
    return OperatorStage(begin=stage.begin, devices=stage.devices, choices=stage.choices, recomputed=tuple(recomputed))


def fixed_bytes(profile: Profile, costs: Sequence[Costs]) -> float:
    """Returns what a stage holds whatever is recomputed: states, and what the allocator reserves."""
    weights = sum(one.weight_bytes for one in costs)
    forward = max((one.reserved_forward_bytes for one in costs[:-1]), default=0.0)
    backward = max((one.reserved_backward_bytes for one in costs[:-1]), default=0.0)
    return weights * profile.family.copies + max(forward + backward, weights)


def _pieces(
    profile: Profile,
    starts: Sequence[tuple[int, bool]],
    stage: OperatorStage,
    held: Sequence[float],
    costs: Sequence[Costs],
) -> list[tuple[int, OperatorSegment]]:
    """Returns the parts of segments that are in the stage, each with its first operator."""
    inside = [one for one in starts if stage.begin < one[0] < stage.end]
    found = []
    for (begin, block), (end, next_block) in pairwise([(stage.begin, True), *inside, (stage.end, False)]):
        first, last = begin - stage.begin, end - stage.begin
        names = profile.operators[begin:end]
        allowed = [name not in profile.family.kept for name in names]
        allowed[0] = allowed[0] and block
        found.append(
            (
                begin,
                OperatorSegment(
                    tuple(held[first:last]),
                    tuple(one.forward_s for one in costs[first:last]),
                    tuple(allowed),
                    next_block,
                ),
            )
        )
    return found


def cheapest(curves: Sequence[Sequence[Corner]], lacking: float, behind: int) -> list[Corner] | None:
    """Returns a corner of each curve so that what is saved, less the largest that comes back, makes up for ``lacking``.

    Walks along all curves by price, which is best for the bytes that it stops at, then takes back what is not needed.
    """
    steps = sorted(
        ((high.seconds - low.seconds) / (high.saved_bytes - low.saved_bytes), number, place)
        for number, curve in enumerate(curves)
        for place, (low, high) in enumerate(pairwise(curve), start=1)
    )
    places, saved, peak = [0] * len(curves), 0.0, 0.0
    for _, number, place in steps:
        low, high = curves[number][places[number]], curves[number][place]
        saved, peak = saved + high.saved_bytes - low.saved_bytes, max(peak, high.peak_bytes)
        places[number] = place
        if saved * (behind + 1) - peak >= lacking:
            return _less(curves, places, saved - (lacking + peak) / (behind + 1))
    return None


def _less(curves: Sequence[Sequence[Corner]], places: list[int], spare: float) -> list[Corner]:
    """Goes back on curves while ``spare`` bytes allow it, first where that saves most seconds."""
    while True:
        backs = [
            (curve[place].seconds - curve[lower].seconds, number, lower)
            for number, (curve, place) in enumerate(zip(curves, places, strict=True))
            for lower in range(place)
            if curve[place].saved_bytes - curve[lower].saved_bytes <= spare
        ]
        gain, number, lower = max(backs, default=(0.0, 0, 0))
        if gain <= 0:
            return [curve[place] for curve, place in zip(curves, places, strict=True)]
        spare -= curves[number][places[number]].saved_bytes - curves[number][lower].saved_bytes
        places[number] = lower
