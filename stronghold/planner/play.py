"""Plays a program against clocks: when each of its operations begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stronghold.planner.disk_play import DiskPlay, Job
from stronghold.planner.program import Program
from stronghold.planner.step_costs import Resource


@dataclass(frozen=True)
class Played:
    """Seconds from the beginning at which each operation began and ended, by its number."""

    begins_s: list[float]
    ends_s: list[float]
    disk_jobs: list[Job]


def play(
    program: Program,
    work_s: Sequence[float],
    slowed: Mapping[tuple[Resource, Resource], float],
    disk: DiskPlay | None = None,
) -> Played:
    """Returns when the operations of ``program`` begin and end that take ``work_s`` each where nothing slows them.

    A resource works on one operation at a time, in order, each as soon as all that it is after have ended. While
    resources slow one another, as ``slowed`` says, each advances at its lower rate. What ``disk`` is asked about begins
    when that says so; the disk itself is a resource, too, whose job gives way to a more urgent one.
    """
    followers, waiting = program.followers, list(program.waiting)
    resources, disk_number = program.resources, int(Resource.DISK)
    begins_s, ends_s = [0.0] * len(resources), [0.0] * len(resources)
    asked, let_go = (disk.asked, disk.let_go) if disk is not None else (frozenset[int](), set[int]())
    rates = _Rates(slowed)
    rate, now_s, busy = rates.of(0), 0.0, 0
    finishes_s: dict[int, float] = {}
    """By resource, as its rate is now."""
    at_work: dict[int, int] = {}
    job: Job | None = None
    ready = [here for here, count in enumerate(waiting) if not count]
    over: list[int] = []
    while True:
        while ready or over:
            if over:
                here = over.pop()
                ends_s[here] = now_s
                if here in asked and disk is not None:
                    disk.ended(here)
                    ready += disk.released()
                for follower in followers[here]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
                continue
            here = ready.pop()
            if here not in let_go:
                begins_s[here] = now_s
                if here in asked and disk is not None:
                    may_begin = disk.may_begin(here)
                    ready += disk.released()
                    if not may_begin:
                        continue
            if (work := work_s[here]) > 0:
                begins_s[here], resource = now_s, resources[here]
                at_work[resource], finishes_s[resource] = here, now_s + work / rate[resource]
                busy |= 1 << resource
            else:
                over.append(here)
        if disk is not None and (head := disk.head()) is not job:
            if job is not None and not job.done:
                job.left_s = (finishes_s.pop(disk_number) - now_s) * rate[disk_number]
            if head is not None:
                head.began_s = now_s if head.began_s < 0 else head.began_s
                finishes_s[disk_number] = now_s + head.left_s / rate[disk_number]
            job, busy = head, busy & ~(1 << disk_number) | (head is not None) << disk_number
        if not finishes_s:
            break
        if (changed := rates.of(busy)) is not rate:
            finishes_s = {
                resource: now_s + (end_s - now_s) * rate[resource] / changed[resource]
                for resource, end_s in finishes_s.items()
            }
            rate = changed
        resource = min(finishes_s, key=finishes_s.__getitem__)
        now_s = finishes_s.pop(resource)
        busy &= ~(1 << resource)
        if resource == disk_number:
            assert disk is not None and job is not None
            disk.finished(job, now_s)
            ready += disk.released()
            job = None
        else:
            over.append(at_work[resource])
    assert not any(waiting), "operations that wait for one another"
    return Played(begins_s, ends_s, disk.jobs if disk is not None else [])


class _Rates:
    """At which rate each resource advances, 1 where nothing slows it, by the set of resources that are at work."""

    def __init__(self, slowed: Mapping[tuple[Resource, Resource], float]) -> None:
        self._slowed = slowed
        self._known: dict[int, tuple[float, ...]] = {}
        self._unslowed = (1.0,) * len(Resource)

    def of(self, busy: int) -> tuple[float, ...]:
        """Returns the rates by resource; the same object wherever nothing is slowed."""
        if not self._slowed:
            return self._unslowed
        if busy not in self._known:
            rates = [1.0] * len(Resource)
            for (resource, other), factor in self._slowed.items():
                if busy >> other & 1:
                    rates[resource] /= factor
            self._known[busy] = tuple(rates)
        return self._known[busy]
