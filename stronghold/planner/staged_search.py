"""Which cut of a model over processes makes the shortest step that fits: stages, replicas, and what each stage does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from stronghold.errors import BudgetError
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.search import ENOUGH
from stronghold.planner.staged_step import StagedStep, StagedWork, fits, needed_bytes, staged_bound_s, staged_step

PER_PROCESS = (1, 2)
"""Stages that a process may have."""
FEW = 16
"""Layers of a model for which every window is looked at."""
PER_STAGE = 4
"""Micro-batches for each stage, at most: with as many the bubble is small (Huang et al., GPipe, 2019)."""
FILLED = 3
"""How many of the fastest choices that recompute all layers are tried again with as many layers kept as fit."""
CUT_AGAIN = 4096
"""Up to so many stages times layers the row is cut anew for that, 0.1 ms for each; above, the cut stays."""


class StagedChoice(NamedTuple):
    """One setting of everything that is searched over where a model is in stages.

    Each of ``replicas`` has ``processes``, with ``per_process`` stages each. Activations of all layers are kept, or of
    none; or, with None, of as many in each stage as fit. ``window`` is None where all layers stay on the device;
    ``store`` is where they are kept else.
    """

    replicas: int
    processes: int
    per_process: int
    micro_batches: int
    is_kept: bool | None
    states: str
    window: int | None = None
    store: str = "ram"

    @property
    def stages(self) -> int:
        return self.processes * self.per_process

    @property
    def pipeline(self) -> Pipeline:
        """One forward and one backward pass in turn, where there are micro-batches enough for that."""
        schedule = "Interleaved1F1B" if self.per_process > 1 else "1F1B"
        if schedule == "1F1B" and self.micro_batches < self.processes:
            schedule = "GPipe"
        return Pipeline(
            schedule=schedule,
            devices=self.processes,
            micro_batches=self.micro_batches,
            stages_per_device=self.per_process,
        )


@dataclass(frozen=True, kw_only=True)
class StagedSpace:
    """What may be chosen: ``windows`` are the numbers of layers that a window may have, ascending.

    Without them all layers stay on the device, which they may do, too, where they ``may_stay``. Where the device's
    memory is not ``apart`` from the host's, layers that stay are there once, and slots are a second copy; but of
    replicas, which have in common what does not stay, each would have a copy of its own. Where layers are on disk
    slots are the only copy. Where layers may be of both ``kepts``, stages of a process each may keep some of theirs.
    """

    layers: int
    batch: int
    kepts: Sequence[bool] = (False, True)
    states: Sequence[str] = ("fp32",)
    stores: Sequence[str] = ("ram",)
    windows: Sequence[int] = ()
    may_stay: bool = True
    apart: bool = True

    def choices(self, replicas: int, processes: int) -> Iterator[StagedChoice]:
        """Yields all choices for so many replicas of so many processes, but for the windows: with the first one.

        Several stages of a process take turns in its window, of which no step model is known here: they are there
        where layers stay.
        """
        for per_process, is_kept, states in product(PER_PROCESS, self.kepts, self.states):
            stages = processes * per_process
            if stages > self.layers:
                continue
            for micro_batches in micro_batches_of(self.batch // replicas, stages):
                if per_process > 1 and micro_batches % max(1, micro_batches // processes):
                    continue  # the schedule has no such rounds
                choice = StagedChoice(replicas, processes, per_process, micro_batches, is_kept, states)
                if self.may_stay and (self.apart or replicas == 1):
                    yield choice
                if not self.windows or per_process > 1:
                    continue
                for store in self.stores:
                    if self.apart or replicas > 1 or not self.may_stay or store != "ram":
                        yield choice._replace(window=self.windows[0], store=store)


def micro_batches_of(samples: int, stages: int) -> list[int]:
    """Returns the numbers of micro-batches that divide the ``samples`` of a replica, as many as are worth a look."""
    return [count for count in range(1, PER_STAGE * stages + 1) if samples % count == 0]


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A choice and its step."""

    choice: StagedChoice
    step: StagedStep


@dataclass(frozen=True, kw_only=True)
class StagedRefusal:
    """A choice that does not fit: a process's ``place`` has ``limit_bytes`` and would do with ``needed_bytes``."""

    choice: StagedChoice
    place: str
    needed_bytes: int
    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class StagedFound:
    """The best plan of so many replicas and processes, if any fits, and what may be better and does not."""

    plan: StagedPlan | None
    refused: list[StagedRefusal] = field(default_factory=list)


def search_stages(
    space: StagedSpace,
    replicas: int,
    processes: int,
    work_of: Callable[[StagedChoice], StagedWork],
    bytes_of: Callable[[StagedChoice, StagedStep], Mapping[str, int]],
    limits: Mapping[str, int],
    *,
    place: str = "device",
) -> StagedFound:
    """Returns the shortest step of ``replicas`` of ``processes`` each, in stages.

    ``work_of`` says what a step of a choice consists of, with what a stage may take of ``place``; ``bytes_of`` what
    the fullest process takes of each place when the row is cut. The window is the largest that fits. Choices are
    bounded from below by sums, and cut and played in that order until no other can be shorter by more than ``ENOUGH``.
    Of the best that recompute every layer, stages then keep the activations of as many as the memory has room for.
    """
    return _StagedSearch(space, work_of, bytes_of, limits, place).found(space.choices(replicas, processes))


class _StagedSearch:
    def __init__(
        self,
        space: StagedSpace,
        work_of: Callable[[StagedChoice], StagedWork],
        bytes_of: Callable[[StagedChoice, StagedStep], Mapping[str, int]],
        limits: Mapping[str, int],
        place: str,
    ) -> None:
        self._space, self._work_of, self._bytes_of = space, work_of, bytes_of
        self._limits, self._place = limits, place
        self._refused: list[tuple[float, StagedRefusal]] = []
        self._recomputing: list[StagedPlan] = []

    def found(self, choices: Iterable[StagedChoice]) -> StagedFound:
        best: StagedPlan | None = None
        bounds = sorted(((self._bound_s(one), one) for one in choices), key=lambda each: each[0])
        slower: list[StagedChoice] = []
        for number, (bound_s, choice) in enumerate(bounds):
            if best is not None and bound_s >= (1 - ENOUGH) * best.step.step_s:
                slower = [one for _, one in bounds[number:]]
                break
            work = self._work_of(choice)
            if not fits(work):
                needed = needed_bytes(work) + self._limits[self._place] - int(work.memory_bytes)
                self._refuse(choice, self._place, needed)
                continue
            for one in [choice] if choice.window is None else self._windows(choice):
                if best is None or staged_bound_s(self._work_of(one)) < (1 - ENOUGH) * best.step.step_s:
                    tried = self._tried(one)
                    if tried is not None and (best is None or tried.step.step_s < best.step.step_s):
                        best = tried
        if best is not None and {False, True} <= {*self._space.kepts}:
            best = self._filled(best, [one for one in slower if not one.is_kept])
        better = [one for bound_s, one in self._refused if best is None or bound_s < best.step.step_s]
        better.sort(key=lambda one: one.needed_bytes - one.limit_bytes)
        return StagedFound(plan=best, refused=better)

    def _bound_s(self, choice: StagedChoice) -> float:
        """Returns seconds below which no step of a choice is, whatever its window."""
        window = None if choice.window is None else self._space.windows[-1]
        return staged_bound_s(self._work_of(choice._replace(window=window)))

    def _windows(self, choice: StagedChoice) -> list[StagedChoice]:
        """Returns the choice with windows that fit, of which its own does: the largest ones first.

        They are the largest with which as many layers in each stage fit, the largest at all, and some below that, of
        few layers all. A larger window spares fetches, and may leave no room for stages of equal time.
        """
        work_of, windows = self._work_of, self._space.windows
        evenly = self._largest(choice, lambda one: needed_bytes(work_of(one)) <= work_of(one).memory_bytes)
        place, steps = self._largest(choice, lambda one: fits(work_of(one))), [0, 1]
        if self._space.layers <= FEW:
            return [choice._replace(window=window) for window in reversed(windows[: place + 1])]
        # In a long stage a layer more or less counts for little.
        faster = 2 if ENOUGH * self._space.layers < choice.stages else 8
        while steps[-1] <= place:
            steps.append(faster * steps[-1])
        found = {windows[evenly], *(windows[place - step] for step in steps[:-1])}
        return [choice._replace(window=window) for window in sorted(found, reverse=True)]

    def _largest(self, choice: StagedChoice, has_room: Callable[[StagedChoice], bool]) -> int:
        """Returns the place of the largest window that has room, of the first one where none is known to."""
        layers, stages = self._space.layers, choice.stages
        most = layers - stages + 1
        if layers > FEW:
            most = min(most, 2 * -(-layers // stages))  # few stages have more layers than that
        windows = [one for one in self._space.windows if one <= most] or self._space.windows[:1]
        low, high = 0, len(windows) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if has_room(choice._replace(window=windows[middle])):
                low = middle
            else:
                high = middle - 1
        return low

    def _tried(self, choice: StagedChoice) -> StagedPlan | None:
        step = staged_step(self._work_of(choice))
        if not self._has_room(choice, step):
            return None
        found = StagedPlan(choice=choice, step=step)
        if not choice.is_kept:
            self._recomputing.append(found)
        return found

    def _filled(self, best: StagedPlan, slower: Sequence[StagedChoice]) -> StagedPlan:
        """Returns the best plan of those whose stages keep as many layers' activations as fit, if it is shorter.

        Those that were tried come first, and then ``slower`` ones, which were not. Stages that a process has several
        of would each have to know what the others keep: those keep all, or none.
        """
        cuts: dict[StagedChoice, Sequence[int]] = {}
        for plan in sorted(self._recomputing, key=lambda plan: plan.step.step_s):
            if plan.choice.per_process == 1:
                first = None if plan.choice.window is None else self._space.windows[0]
                cuts.setdefault(
                    plan.choice._replace(window=first), [stage.layers for stage in plan.step.partition.stages]
                )
        is_long = self._is_long(best.choice)
        found = [*cuts.items()][: 1 if is_long else FILLED]
        if not is_long:
            others = [one for one in slower if one.per_process == 1]
            others.sort(key=lambda one: (self._bound_s(one._replace(is_kept=None)), one.window is not None))
            found += [(one, ()) for one in others[:FILLED]]
        for like, sizes in found:
            for one in [like] if like.window is None else self._windows(like):
                choice = one._replace(is_kept=None)
                if staged_bound_s(self._work_of(choice)) >= (1 - ENOUGH) * best.step.step_s:
                    continue
                step = self._step_of(choice, sizes)
                if step is not None and step.step_s < best.step.step_s:
                    some = any(stage.recomputed for stage in step.partition.stages)
                    best = StagedPlan(choice=choice if some else choice._replace(is_kept=True), step=step)
        return best

    def _is_long(self, choice: StagedChoice) -> bool:
        return choice.stages * self._space.layers > CUT_AGAIN

    def _step_of(self, choice: StagedChoice, sizes: Sequence[int]) -> StagedStep | None:
        """Returns the step of stages that are as full as the fullest process allows, of ``sizes`` in a long row."""
        work, limits = self._work_of(choice), self._limits
        while True:
            try:
                step = staged_step(work, sizes if self._is_long(choice) else None)
            except BudgetError:
                return None
            needed = self._bytes_of(choice, step)
            if all(needed.get(place, 0) <= limit for place, limit in limits.items()):
                return step
            if (over := needed.get(self._place, 0) - limits[self._place]) <= 0:
                return None
            work = replace(work, memory_bytes=work.memory_bytes - over)

    def _has_room(self, choice: StagedChoice, step: StagedStep) -> bool:
        needed = self._bytes_of(choice, step)
        for place, limit_bytes in self._limits.items():
            if needed.get(place, 0) > limit_bytes:
                self._refuse(choice, place, needed[place])
                return False
        return True

    def _refuse(self, choice: StagedChoice, place: str, needed_bytes: int) -> None:
        limit_bytes = self._limits[place]
        refusal = StagedRefusal(choice=choice, place=place, needed_bytes=needed_bytes, limit_bytes=limit_bytes)
        self._refused.append((staged_bound_s(self._work_of(choice)), refusal))
