"""Plans for several processes of one machine: replicas of the whole model, stages of it, and both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stronghold.distributed.stage_planner import StagePlanner
from stronghold.errors import BudgetError
from stronghold.planner.machine_file import Spread
from stronghold.planner.offloaded_stages import RESOURCES
from stronghold.planner.other_plans import Alternative, LeftOut, Refused
from stronghold.planner.partition_file import object_of
from stronghold.planner.staged_search import StagedFound, StagedPlan, StagedRefusal, StagedSpace, search_stages
from stronghold.planner.staged_step import spans_of, staged_step
from stronghold.planner.training_plan import TrainingPlan
from stronghold.units import format_unequal

_WORKS = dict(zip(RESOURCES, ("compute", "fetches", "gradients", "updates", "disk"), strict=True))
_WAITED = dict(zip(RESOURCES[1:], ("fetch", "gradients", "update", "disk"), strict=True))


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that can be cut into stages: who answers for its steps, and what may be chosen."""

    planner: StagePlanner
    space: StagedSpace


def splits(processes: int) -> Iterator[tuple[int, int]]:
    """Yields all (replicas, processes of each) that so many processes can be."""
    for replicas in range(1, processes + 1):
        if processes % replicas == 0:
            yield replicas, processes // replicas


def cannot_be(replicas: int, each: int, *, batch: int, layers: int, staged: StagedModel | str) -> str | None:
    """Returns why so many replicas of so many processes cannot train the model, None if they can."""
    if batch % replicas:
        return f"the replicas must divide the batch of {batch} samples; pass a multiple of {replicas}"
    if each > 1 and isinstance(staged, str):
        return staged
    if each > max(1, layers):
        return f"each stage needs a layer, of which there are {layers}"
    return None


def best_of(
    processes: int,
    *,
    batch: int,
    layers: int,
    staged: StagedModel | str,
    states: Sequence[str],
    replicated: Callable[[int, float], TrainingPlan],
    told: Callable[[dict[str, Any]], TrainingPlan],
) -> TrainingPlan:
    """Returns the plan of the shortest step of so many processes, with the best of every other split of them.

    ``replicated`` plans for so many replicas of one stage each, and no further than to see that they are no shorter
    than the shortest step so far, which it gets; they come last, for to play one of their steps takes the longest, and
    their plan may then be longer than their best. ``staged`` is what can be cut, or why nothing can be, ``states`` what
    moments may be in; ``told`` makes a plan of what is known of one in stages. Raises BudgetError where nothing fits,
    and ValueError where the processes can be nothing that trains the model.
    """
    if processes > (most := batch * max(1, layers)):
        raise ValueError(
            f"processes must be at most {most:,} (got {processes:,}): each has a sample of the batch of {batch}, or a "
            f"layer of {layers}; pass fewer"
        )
    plans, refused, left_out, missing = list[TrainingPlan](), list[Refused](), list[LeftOut](), list[str]()
    for replicas, each in splits(processes):  # of one stage last
        reason = cannot_be(replicas, each, batch=batch, layers=layers, staged=staged)
        if reason is not None:
            left_out.append(LeftOut(stages=each, replicas=replicas, reason=reason))
        elif each == 1:
            parallel = {"stages": 1, "replicas": replicas}
            try:
                found = replicated(replicas, min((plan.step_s.likely for plan in plans), default=math.inf))
            except BudgetError as error:
                missing.append(f"{replicas} replicas: {error.lacking}")
                continue
            plans.append(replace(found, processes=processes, parallel=parallel, others=(), refused=()))
            refused += [replace(one, parallel=parallel) for one in found.refused[:1]]
        else:
            assert isinstance(staged, StagedModel)
            planner = staged.planner
            result = search_stages(
                staged.space, replicas, each, planner.work_of, planner.bytes_of, planner.limits, place=planner.place
            )
            if result.plan is not None:
                plans.append(told(plan_fields(planner, result.plan, processes)))
            refused += [_refused(planner, one) for one in result.refused[:1]]
            missing += _missing(result, replicas)
    if not plans:
        may_disk = isinstance(staged, str) or bool(staged.planner.directories)
        raise _nothing(processes, missing, left_out, may_disk=may_disk, states=states)
    best, *others = sorted(plans, key=lambda plan: plan.step_s.likely)
    alternatives = [
        Alternative(
            settings=other.settings,
            optimizer=other.optimizer,
            step_s=other.step_s.likely,
            device_bytes=other.device_bytes,
            host_bytes=other.host_bytes,
            parallel=other.parallel,
        )
        for other in others
    ]
    return replace(best, others=alternatives, refused=refused, left_out=tuple(left_out))


def settings_of(planner: StagePlanner, plan: StagedPlan, *, is_host: bool) -> dict[str, Any]:
    """Returns what ``stronghold.offload`` is to get in each process."""
    choice = plan.choice
    activations = "keep" if choice.is_kept else "recompute"  # where stages keep some, by their part of the partition
    if choice.window is None:
        found: dict[str, Any] = {"window": "auto" if is_host else 1, "resident": "auto", "activations": activations}
    else:
        found = {"window": choice.window, "resident": 0, "activations": activations}
    if choice.store != "ram":
        found["store"] = [*planner.directories]
    if not is_host:
        found["device_memory"] = max(one.device_memory for one in planner.taken(choice, plan.step))
    return found


def plan_fields(planner: StagePlanner, plan: StagedPlan, processes: int) -> dict[str, Any]:
    """Returns what is known of a plan in stages, by the names of a TrainingPlan."""
    choice, step = plan.choice, plan.step
    stages = step.partition.stages
    sizes, ratios = [stage.layers for stage in stages], [stage.recompute_ratio for stage in stages]
    low_s, high_s = (
        staged_step(replace(planner.work_of(choice, pace), memory_bytes=float("inf"), ratios=ratios), sizes).step_s
        for pace in ("fast", "slow")
    )
    slowest = max(step.partition.stages, key=lambda stage: stage.time_s)
    count = choice.micro_batches * choice.per_process
    working_s, waited_s = count * slowest.time_s, count * (slowest.time_s - slowest.computing_s)
    busy_s = {"compute": count * slowest.computing_s, _WORKS[slowest.longest]: working_s}
    waits_s = {"stages": step.step_s - working_s}
    if slowest.longest in _WAITED:
        waits_s[_WAITED[slowest.longest]] = waited_s
    taken = planner.taken(choice, step)
    if planner.place == "memory":
        there = on_host = max(taken, key=lambda one: one.device_bytes + one.host_bytes)
    else:  # one process may be the fullest on the device, and another one on the host
        there, on_host = max(taken, key=lambda one: one.device_bytes), max(taken, key=lambda one: one.host_bytes)
    return {
        "processes": processes,
        "parallel": {
            "stages": choice.stages,
            "replicas": choice.replicas,
            "micro_batches": choice.micro_batches,
            "schedule": choice.pipeline.schedule,
            "balance": sizes if choice.is_kept is not None else object_of(step.partition),
        },
        "settings": settings_of(planner, plan, is_host=planner.place == "memory"),
        "optimizer": {"states": choice.states, "update": "deferred"},
        "step_s": Spread(min(low_s, step.step_s), step.step_s, max(high_s, step.step_s)),
        "longest": _WORKS[slowest.longest],
        "busy_s": busy_s,
        "waits_s": waits_s,
        "slots_bytes": there.held.slots,
        "gradient_bytes": there.held.gradients,
        "root_bytes": there.held.root,
        "resident_bytes": there.held.resident,
        "root_gradient_bytes": there.held.root_gradients,
        "activation_bytes": there.activation_bytes,
        "pinned_bytes": on_host.held.pinned,
        "pageable_bytes": on_host.held.pageable + on_host.sums_bytes,
        "disk_bytes": max(one.held.disk for one in taken),
        "written_bytes": max(one.written_bytes for one in taken),
        "spans": spans_of(planner.work_of(choice), step),
    }


def _refused(planner: StagePlanner, one: StagedRefusal) -> Refused:
    choice = one.choice
    window: dict[str, Any] = {"resident": "auto"} if choice.window is None else {"window": choice.window, "resident": 0}
    if planner.directories:
        window["store"] = "ram" if choice.store == "ram" else [*planner.directories]
    return Refused(
        settings={**window, "activations": "keep" if choice.is_kept else "recompute"},
        optimizer={"states": choice.states, "update": "deferred"},
        place=one.place,
        needed_bytes=one.needed_bytes,
        limit_bytes=one.limit_bytes,
        parallel={
            "stages": choice.stages,
            "replicas": choice.replicas,
            "micro_batches": choice.micro_batches,
            "schedule": choice.pipeline.schedule,
        },
    )


def _missing(found: StagedFound, replicas: int) -> list[str]:
    if found.plan is not None or not found.refused:
        return []
    least = min(found.refused, key=lambda one: one.needed_bytes)
    place = least.place if least.place == "memory" else f"{least.place} memory"
    of = f" of {replicas} replicas" if replicas > 1 else ""
    needed, limit = format_unequal(least.needed_bytes, least.limit_bytes)
    return [f"{least.choice.stages} stages{of}: {place} of each process must hold {needed} (got {limit})"]


def _nothing(
    processes: int, missing: Sequence[str], left_out: Sequence[LeftOut], *, may_disk: bool, states: Sequence[str]
) -> Exception:
    if missing:
        lacking = "; ".join(missing)
        eight = "allow states='8bit', " if set(states) == {"fp32"} else ""
        disk = "" if may_disk else "keep layers on disk (store=), "
        return BudgetError(
            f"nothing fits {processes} processes: {lacking}; raise the budgets of each process, {eight}{disk}or make "
            "the batch smaller"
        )
    reasons = "; ".join(f"stages={one.stages}, replicas={one.replicas}: {one.reason}" for one in left_out)
    return ValueError(
        f"so many processes must be stages times replicas that can train the model (got processes={processes}; "
        f"{reasons}); pass another number of processes, or another batch"
    )
