"""Which settings make the shortest step that fits: pruned by bytes, then moved at the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice, product

from stronghold.planner.choices import Choice, Space
from stronghold.planner.step import StepTime, step_time
from stronghold.planner.step_bound import StepBound, step_bound
from stronghold.planner.step_costs import LayerWork, Machine, Resource, RootWork, StepSettings

ENOUGH = 0.02
"""A step that is shorter by no more than this share is not looked for."""
REFUSALS = 50
"""So many choices that do not fit are looked at for each place."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What ``step_time`` is asked with."""

    layers: Sequence[LayerWork]
    machine: Machine
    settings: StepSettings
    root: Sequence[RootWork] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, its step, and the bytes that it takes in each place."""

    choice: Choice
    step: StepTime
    bytes_by_place: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A choice that does not fit: ``place``, the first that is ``lacking``, has ``limit_bytes`` and needs more."""

    choice: Choice
    place: str
    needed_bytes: int
    limit_bytes: int
    lacking: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plans, the shortest step first, and what was refused and may be better: what lacks least in each place.

    Where nothing fits there are no plans, and the refusals say what would have to be there at the least.
    """

    plans: list[Plan]
    refused: list[Refusal]


def search(
    space: Space,
    work_of: Callable[[Choice], Work],
    bytes_of: Callable[[Choice], Mapping[str, int]],
    limits: Mapping[str, int],
    *,
    count: int = 3,
    rival_s: float = math.inf,
    least_s_of: Callable[[int | None], float] = lambda _: 0.0,
) -> Found:
    """Returns the ``count`` best plans among the choices of ``space`` whose bytes are within ``limits``, by place.

    ``work_of`` says what a step of a choice consists of, ``bytes_of`` what it takes of each place; both must grow, or
    not shrink, with the window, and a place without a limit has room for anything.

    For each combination of the settings that are few (micro-batch, update, states, store), the many-valued ones are
    moved step by step: what relieves the resource that is longest is tried first, as Aceso does (Liu et al., Aceso:
    Efficient Parallel DNN Training through Iterative Bottleneck Alleviation, EuroSys 2024), and the window is always
    the largest that fits beside. That is done with a lower bound of the step, which takes sums alone; behind each
    micro-batch steps are played, the most promising first, until no other choice so far can be shorter, and at the end
    around the best once more.

    ``rival_s`` is a step that is known from elsewhere: what cannot be shorter than that is not played, but for one
    choice that fits, so that there is a plan. ``least_s_of`` says what no step over such a micro-batch is below: where
    that is no shorter than a rival, or than the best step by more than ``ENOUGH`` once there are ``count`` plans,
    ``work_of`` and ``bytes_of`` are not asked about the micro-batch.
    """
    return _Search(space, work_of, bytes_of, limits, rival_s, least_s_of).found(count)


class _Search:
    def __init__(
        self,
        space: Space,
        work_of: Callable[[Choice], Work],
        bytes_of: Callable[[Choice], Mapping[str, int]],
        limits: Mapping[str, int],
        rival_s: float,
        least_s_of: Callable[[int | None], float],
    ) -> None:
        self._space, self._work_of, self._bytes_of, self._limits = space, work_of, bytes_of, limits
        self._rival_s, self._least_s_of = rival_s, least_s_of
        self._bounds: dict[Choice, StepBound] = {}
        self._widest_known: dict[Choice, Choice | None] = {}
        self._plans: dict[Choice, Plan] = {}
        self._refusals: dict[Choice, Refusal] = {}

    def found(self, count: int) -> Found:
        """Searches, and returns the ``count`` best plans."""
        space, best = self._space, None
        for micro_batch in space.micro_batches:
            if self._plans and self._is_no_shorter(self._least_s_of(micro_batch), count):
                continue
            for update, states, store in product(space.updates, space.states, space.stores):
                combined = Choice(window=1, micro_batch=micro_batch, update=update, states=states, store=store)
                for begin in self._beginnings(combined, best):
                    end = self._descend(begin, self._bound_s)
                    best = min(best or end, end, key=self._bound_s)
            self._play_promising(count)
        if self._plans:
            self._descend(self._best().choice, self._played_s)
        return Found(plans=sorted(self._plans.values(), key=self._place)[:count], refused=[*self._refused(count)])

    def _refused(self, count: int) -> Iterator[Refusal]:
        """Yields, for each place, the choices that lack the fewest bytes there and may be better than the best plan.

        Without one they are those that lack there alone, or else one choice in all places that it lacks.
        """
        known = [*self._refusals.values()]
        if not self._plans and known:
            alone = [one for one in known if len(one.lacking) == 1]
            if not alone:
                least = min(
                    known, key=lambda one: max(n / (self._limits[place] + 1) for place, n in one.lacking.items())
                )
                yield from (self._refusal(least.choice, place, least.lacking) for place in least.lacking)
                return
            known = alone
        for place in self._limits:
            refusals = [one for one in known if one.place == place]
            nearest = nsmallest(REFUSALS, refusals, key=lambda one: one.needed_bytes - one.limit_bytes)
            better = (one for one in nearest if not self._plans or self._bound_s(one.choice) < self._best().step.step_s)
            yield from islice(better, count)

    def _beginnings(self, combined: Choice, best: Choice | None) -> list[Choice]:
        """Returns where to begin with a combination: with few resident layers, with many, and as in the best so far.

        To have layers resident takes bytes on the device and gives them back on the host: what fits may begin with
        either.
        """
        residents = [n for n in self._space.residents if self._space.windows_beside(n)]
        each = [combined._replace(resident=n, kept=self._space.kepts[0]) for n in residents]
        found = [self._first_that_fits(each), self._first_that_fits(each[::-1])]
        if best is not None:
            found.append(self._widest(combined._replace(resident=best.resident, kept=best.kept)))
        return [one for one in found if one is not None]

    def _first_that_fits(self, each: Sequence[Choice]) -> Choice | None:
        """Returns the first of a row that fits, with its window; where layers differ much, one of the first.

        What the place that refuses the first one has to hold shrinks along the row: the first one that it does not
        refuse is found by halves. If that one is refused as well, all are looked at.
        """
        if not each:
            return None
        place, low, high = self._refused_at(each[0]), -1, len(each) - 1
        while place is not None and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._refused_at(each[middle]) == place else (low, middle)
        if place is not None and (wide := self._widest(each[high])) is not None:
            return wide
        return next((wide for one in each if (wide := self._widest(one)) is not None), None)

    def _refused_at(self, choice: Choice) -> str | None:
        """Returns the place that a choice does not fit with its smallest window, None if it fits or has no window."""
        if self._widest(choice) is not None or not (windows := self._space.windows_beside(choice.resident)):
            return None
        return self._refusals[choice._replace(window=windows[0])].place

    def _play_promising(self, count: int) -> None:
        """Plays the choices whose bounds are the lowest, until no other can be shorter by more than ``ENOUGH``."""
        for choice in sorted(self._bounds, key=lambda choice: self._bounds[choice].step_s):
            if self._plans and self._is_no_shorter(self._bounds[choice].step_s, count):
                break
            self._play(choice)

    def _is_no_shorter(self, least_s: float, count: int) -> bool:
        """Whether a step of ``least_s`` or more need not be played, where plans are known."""
        enough_s = (1 - ENOUGH) * self._best().step.step_s if len(self._plans) >= count else math.inf
        return least_s >= min(enough_s, self._rival_s)

    def _best(self) -> Plan:
        return min(self._plans.values(), key=self._place)

    def _place(self, plan: Plan) -> tuple[float, int]:
        return float(f"{plan.step.step_s:.9g}"), self._space.updates.index(plan.choice.update)  # rounding apart

    def _descend(self, choice: Choice, seconds: Callable[[Choice], float]) -> Choice:
        """Moves from ``choice`` as long as that makes the step shorter; returns where it ends."""
        known_s = seconds(choice)
        while True:
            for moves in self._moves(choice):
                tried = [(seconds(move), number, move) for number, move in enumerate(moves)]
                if tried and (best := min(tried))[0] < known_s:
                    known_s, choice = best[0], best[2]
                    break
            else:
                return choice

    def _moves(self, choice: Choice) -> Iterator[list[Choice]]:
        """Yields choices that fit and differ a little: first those that relieve the longest resource, then others."""
        more_resident, more_kept = self._residents(choice, up=True), self._kepts(choice, up=True)
        computes = self._bound(choice).resource is Resource.COMPUTE
        yield more_kept if computes else more_resident
        yield more_resident if computes else more_kept
        yield self._residents(choice, up=False)
        yield self._kepts(choice, up=False)
        yield self._traded(choice)

    def _residents(self, choice: Choice, *, up: bool) -> list[Choice]:
        return self._fitting(choice._replace(resident=n) for n in _steps(self._space.residents, choice.resident, up))

    def _kepts(self, choice: Choice, *, up: bool) -> list[Choice]:
        return self._fitting(choice._replace(kept=n) for n in _steps(self._space.kepts, choice.kept, up))

    def _traded(self, choice: Choice) -> list[Choice]:
        """Returns choices with one more resident layer for fewer kept ones, and the other way round."""
        residents, kepts = self._space.residents, self._space.kepts
        here, there = residents.index(choice.resident), kepts.index(choice.kept)
        return self._fitting(
            choice._replace(resident=residents[i], kept=kepts[j])
            for up, down in ((1, -1), (1, -2), (2, -1), (-1, 1), (-1, 2), (-2, 1))
            if 0 <= (i := here + up) < len(residents) and 0 <= (j := there + down) < len(kepts)
        )

    def _fitting(self, choices: Iterable[Choice]) -> list[Choice]:
        return [wide for one in choices if (wide := self._widest(one)) is not None]

    def _widest(self, choice: Choice) -> Choice | None:
        """Returns the choice with the largest window that fits, or None where none does."""
        choice = choice._replace(window=1)
        if choice not in self._widest_known:
            self._widest_known[choice] = self._find_widest(choice)
        return self._widest_known[choice]

    def _find_widest(self, choice: Choice) -> Choice | None:
        windows = self._space.windows_beside(choice.resident)
        if not windows or not self._fits(choice._replace(window=windows[0])):
            return None
        low, high = 0, len(windows) - 1  # the first fits
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(choice._replace(window=windows[middle])):
                low = middle
            else:
                high = middle - 1
        return choice._replace(window=windows[low])

    def _fits(self, choice: Choice) -> bool:
        needed = self._bytes_of(choice)
        lacking = {place: needed[place] for place, limit in self._limits.items() if needed.get(place, 0) > limit}
        if lacking and choice not in self._refusals:
            self._refusals[choice] = self._refusal(choice, next(iter(lacking)), lacking)
        return not lacking

    def _refusal(self, choice: Choice, place: str, lacking: Mapping[str, int]) -> Refusal:
        needed, limit = lacking[place], self._limits[place]
        return Refusal(choice=choice, place=place, needed_bytes=needed, limit_bytes=limit, lacking=lacking)

    def _bound(self, choice: Choice) -> StepBound:
        if choice not in self._bounds:
            of = self._work_of(choice)
            self._bounds[choice] = step_bound(of.layers, of.machine, of.settings, of.root)
        return self._bounds[choice]

    def _bound_s(self, choice: Choice) -> float:
        return self._bound(choice).step_s

    def _played_s(self, choice: Choice) -> float:
        """Returns the played step, or infinity where its bound says that it is no shorter than the best or a rival."""
        shorter_s = min((1 - ENOUGH) * self._best().step.step_s, self._rival_s)
        may_be = choice in self._plans or self._bound_s(choice) < shorter_s
        return self._play(choice).step.step_s if may_be else math.inf

    def _play(self, choice: Choice) -> Plan:
        if choice not in self._plans:
            work = self._work_of(choice)
            step = step_time(work.layers, work.machine, work.settings, work.root)
            self._plans[choice] = Plan(choice=choice, step=step, bytes_by_place=self._bytes_of(choice))
        return self._plans[choice]


def _steps(values: Sequence[int], here: int, up: bool) -> Iterator[int]:
    """Yields the values that are one place above (or below) ``here``, two, four, and so on."""
    place, step = values.index(here), 1
    while 0 <= (there := place + step if up else place - step) < len(values):
        yield values[there]
        step *= 2
