"""The search for the plan over operators whose step is the shortest: exact tables first, then moves at the bottleneck.

For each micro-batch the time of the longest stage is bisected; :mod:`reach` says what plans keep it. The best of these
are moved by single operators, then each stage gets its recomputed operators and its operators choices of their own.
Aceso (EuroSys 2024) moves from one start at the bottleneck alone. Its space is the same, but that here the micro-batch
of a whole pipeline may be any that its replicas can share, where Aceso takes those of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stronghold.errors import BudgetError
from stronghold.planner.profiled.finish import Finisher
from stronghold.planner.profiled.layouts import Share, Sharing
from stronghold.planner.profiled.mixed import Mixer
from stronghold.planner.profiled.moves import Bench
from stronghold.planner.profiled.operator_plan import OperatorPlan
from stronghold.planner.profiled.predict import Prediction, predict
from stronghold.planner.profiled.profile import Profile
from stronghold.planner.profiled.reach import Cluster, Draft, Reach
from stronghold.planner.profiled.recompute import segment_starts
from stronghold.planner.profiled.stage_table import StageTable
from stronghold.units import format_bytes

FOREVER_S = 1e15
"""What no stage takes: those that do not fit take for ever."""
UNBOUNDED = 1e30
"""Bytes that hold any stage."""
CLOSE = 1.003
"""How near to the shortest the longest stage is sought."""
WIDER = (1.02, 1.05)
"""How much longer than the shortest the longest stage may be: fewer stages fill faster."""
PRICES = (0.0, 1e-11, 1e-10)
"""Seconds that a byte of memory is worth to the sharings with choices of operators' own."""
SPARSE = 8
"""Borders for each device below which stages may begin at any operator at once."""
KEPT = 6
"""Drafts that are moved, and half as many that are finished."""
TIGHTER = (1.0, 0.97, 0.9)
"""The part of the memory for which drafts are sought, should no stage of the first ones fit when it is finished."""


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The plan, what it takes, and how many drafts were looked at."""

    plan: OperatorPlan
    prediction: Prediction
    drafts: int


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    step_s: float
    micro_batch: int
    drafts: list[Draft]
    bench: Bench


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    memory_bytes: int,
    most_stages: int = 16,
    mixed: bool = True,
) -> FoundPlan:
    """Returns the plan with the shortest predicted step.

    Args:
        profile: Operators' costs.
        cluster: The devices.
        batch: Samples of a step.
        memory_bytes: What a device may hold.
        most_stages: Stages at most.
        mixed: Whether operators of one stage may be shared in different ways.

    Raises:
        BudgetError: Nothing fits; it names the least memory for which something was found.
        ValueError: ``batch`` or ``most_stages`` is below 1, or nothing was profiled that can share the batch.
    """
    for name, value in (("batch", batch), ("most_stages", most_stages)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more (got {value}); pass a whole number")
    if not any(True for _ in _shared(profile, cluster, batch)):
        samples, degrees, ways = (", ".join(map(str, sorted(set(one)))) for one in zip(*profile.costs, strict=True))
        raise ValueError(
            f"the batch must be a whole number of micro-batches that were profiled, by the first algorithm and a "
            f"degree that is a power of two and within a node (got {batch} on nodes of {cluster.devices_per_node}; "
            f"{profile.model} has micro-batches of {samples} samples, degrees of {degrees}, algorithms {ways}); pass "
            "another batch, or profile others"
        )
    for part in TIGHTER:
        candidates = _candidates(profile, cluster, batch, part * memory_bytes, most_stages, mixed)
        if found := _finished(profile, cluster, candidates, batch, memory_bytes, mixed):
            return found
    least = _least_memory(profile, cluster, batch, memory_bytes, most_stages)
    raise BudgetError(
        f"a device must hold its stage of {profile.model} (got {format_bytes(memory_bytes)} on each of "
        f"{cluster.devices} devices; about {format_bytes(least)} would do); give devices more memory, or more devices",
        {"device": least},
    )


def _finished(
    profile: Profile, cluster: Cluster, candidates: Sequence[_Candidate], batch: int, memory_bytes: int, mixed: bool
) -> FoundPlan | None:
    """Returns the best of the candidates with their recomputed operators, None where none of them fits."""
    firsts: dict[tuple[int, int], _Candidate] = {}
    for one in candidates:  # the best of each micro-batch and number of stages
        key = one.micro_batch, len(one.drafts)
        if key not in firsts or one.step_s < firsts[key].step_s:
            firsts[key] = one
    moved = []
    for one in sorted(firsts.values(), key=lambda one: one.step_s)[:KEPT]:
        drafts = one.bench.improved(one.drafts)
        moved.append(replace(one, step_s=one.bench.step_s(drafts), drafts=drafts))
    best: tuple[Prediction, OperatorPlan] | None = None
    for one in sorted(moved, key=lambda one: one.step_s)[: KEPT // 2]:
        finisher = Finisher(profile, cluster, one.micro_batch, batch, memory_bytes, mixed=mixed)
        plan = finisher.finished(one.drafts)
        if plan is not None:
            prediction = predict(profile, plan, cluster.devices_per_node)
            if best is None or prediction.step_s < best[0].step_s:
                best = prediction, plan
    return None if best is None else FoundPlan(prediction=best[0], plan=best[1], drafts=len(candidates))


def _candidates(
    profile: Profile, cluster: Cluster, batch: int, memory_bytes: float, most_stages: int, mixed: bool
) -> list[_Candidate]:
    """Returns drafts for all micro-batches that may be the best."""
    found: list[_Candidate] = []
    shortest = [FOREVER_S]
    for micro_batch, reach, bench in _reaches(profile, cluster, batch, memory_bytes, mixed):
        micro_batches = batch // micro_batch

        def within(limit_s: float, reach: Reach = reach, bench: Bench = bench, micro_batch: int = micro_batch) -> bool:
            plans = reach.within(limit_s, most_stages)
            for drafts in plans:
                found.append(
                    _Candidate(step_s=bench.step_s(drafts), micro_batch=micro_batch, drafts=drafts, bench=bench)
                )
                shortest[0] = min(shortest[0], found[-1].step_s)
            return bool(plans)

        if reach.least_s * micro_batches >= shortest[0]:
            continue
        limit_s = _shortest(within, reach.least_s, shortest[0] / micro_batches)
        if limit_s is not None:
            for wider in WIDER:
                if wider * limit_s * micro_batches < shortest[0]:
                    within(wider * limit_s)
    return found


def _shortest(within: Callable[[float], bool], least_s: float, most_s: float) -> float | None:
    """Returns about the least limit that something is within, None where that is above ``most_s``."""
    if not within(most_s):
        return None
    low, high = least_s, most_s
    if low * 1e6 < high:
        high = 1.04 * least_s
        while not within(high):
            low, high = high, 1.08 * high
    while high > CLOSE * low:
        middle = (low + high) / 2
        if within(middle):
            high = middle
        else:
            low = middle
    return high


def _shared(profile: Profile, cluster: Cluster, batch: int) -> Iterator[tuple[int, list[Share]]]:
    """Yields each micro-batch of all replicas with the choices that were profiled for it, from the largest down."""
    sizes = cluster.sizes()
    samples = {each for each, _, _ in profile.costs}
    for micro_batch in sorted({each * size for each in samples for size in sizes if batch % (each * size) == 0})[::-1]:
        choices = [
            Share(degree, size // degree)
            for size in sizes
            for degree in sizes
            if degree <= size
            and micro_batch % (size // degree) == 0
            and (micro_batch // (size // degree), degree, 0) in profile.costs
        ]
        if choices:
            yield micro_batch, choices


def _reaches(
    profile: Profile, cluster: Cluster, batch: int, memory_bytes: float, mixed: bool
) -> Iterator[tuple[int, Reach, Bench]]:
    starts = segment_starts(profile)
    for micro_batch, choices in _shared(profile, cluster, batch):
        tables = {
            sharing: StageTable(profile, starts, sharing, micro_batch, memory_bytes)
            for sharing in _sharings(profile, micro_batch, choices, mixed)
        }
        by_size: dict[int, list[StageTable]] = {}
        for sharing, table in tables.items():
            by_size.setdefault(sharing.devices, []).append(table)
        lines = profile.costs_of(micro_batch, choices[0])
        borders = _borders([lines[row].input_bytes for row in profile.rows], [begin for begin, _ in starts])
        if len(borders) < SPARSE * cluster.devices:
            borders = list(range(len(profile.operators)))
        yield micro_batch, Reach(by_size, borders, cluster), Bench(tables, cluster, batch // micro_batch)


def _sharings(profile: Profile, micro_batch: int, choices: Sequence[Share], mixed: bool) -> list[Sharing]:
    """Returns the sharings of which stages are made: one choice for all operators, or for each its own."""
    count = len(profile.operators)
    found = [(choice.devices, (choice,) * count) for choice in choices]
    if mixed and profile.family.layouts is not None:
        mixer = Mixer(profile, micro_batch)
        for size in sorted({choice.devices for choice in choices} - {1}):
            for price in PRICES:
                own = mixer.choices(0, count, size, price, 1)
                if own is not None and (size, tuple(own)) not in found:
                    found.append((size, tuple(own)))
    return [Sharing(devices, own) for devices, own in found]


def _borders(inputs: Sequence[float], starts: Sequence[int]) -> list[int]:
    """Returns where stages may begin at first: the four operators of each segment with the smallest inputs."""
    found = {0}
    for begin, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
        found.update(sorted(range(begin, end), key=lambda number: inputs[number])[:4])
    return sorted(found)


def _least_memory(profile: Profile, cluster: Cluster, batch: int, memory_bytes: int, most_stages: int) -> int:
    """Returns about the least memory of a device with which a draft fits, to 1 %."""

    def fits(size: float) -> bool:
        reaches = _reaches(profile, cluster, batch, size, False)
        return any(reach.within(FOREVER_S, most_stages) for _, reach, _ in reaches)

    if not fits(UNBOUNDED):
        raise ValueError(
            f"a plan must use all devices, in stages of a power of two within a node (got {cluster.nodes} nodes of "
            f"{cluster.devices_per_node} for {len(profile.operators)} operators in at most {most_stages} stages, "
            "with the degrees and the samples that were profiled); give fewer devices, or profile more"
        )
    low, high = float(memory_bytes), float(max(memory_bytes, 1)) * 1.1
    while not fits(high):
        low, high = high, 2 * high
    while high > 1.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return int(high)
