"""Makes a draft a plan: its recomputed operators, operators' own choices, and the last moves of borders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stronghold.planner.profiled.layouts import Share
from stronghold.planner.profiled.mixed import Mixer
from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage
from stronghold.planner.profiled.predict import pipeline_s, predict_stage
from stronghold.planner.profiled.profile import Profile
from stronghold.planner.profiled.reach import Cluster, Draft
from stronghold.planner.profiled.recompute import segment_starts, with_room

PRICES = (1e-13, 1e-7)
"""Seconds that a byte of memory is worth at least and at most where it is short."""
ROUNDS = 40
"""Moves at most."""
SHIFTS = (1, 2, 3, 4, 6, 8, 11, 13)
"""Operators that a border moves by."""


@dataclass(frozen=True)
class _StagePlace:
    """Where a stage is in the pipeline: stages behind it, and whether it gets from and sends to another node."""

    behind: int
    receives_across: bool
    sends_across: bool


class Finisher:
    """Finishes drafts of one micro-batch."""

    def __init__(
        self, profile: Profile, cluster: Cluster, micro_batch: int, batch: int, memory_bytes: float, *, mixed: bool
    ) -> None:
        self._profile, self._cluster, self._memory = profile, cluster, memory_bytes
        self._micro_batch, self._batch = micro_batch, batch
        self._mixer = Mixer(profile, micro_batch) if mixed and profile.family.layouts is not None else None
        self._starts = segment_starts(profile)
        self._known: dict[tuple[int, tuple[Share, ...], _StagePlace], tuple[float, OperatorStage | None]] = {}

    def finished(self, drafts: Sequence[Draft]) -> OperatorPlan | None:
        """Returns the plan that the drafts become, None where no operators can be recomputed so that it fits."""
        borders = [draft.begin for draft in drafts] + [drafts[-1].end]
        choices = [choice for draft in drafts for choice in draft.sharing.choices[draft.begin : draft.end]]
        places, before = [], 0
        for number, draft in enumerate(drafts):
            across = self._cluster.across(before, draft.sharing.devices)
            places.append(_StagePlace(len(drafts) - 1 - number, *across))
            before += draft.sharing.devices
        best_s = self._seconds(borders, choices, places)
        for _ in range(ROUNDS):
            moved = self._moved(borders, choices, places, best_s)
            if moved is None and self._mixer is not None:
                moved = self._remixed(self._mixer, borders, choices, places, best_s)
            if moved is None:
                break
            best_s, borders, choices = moved
        stages = [self._stage(borders, choices, places, number)[1] for number in range(len(places))]
        fitting = tuple(stage for stage in stages if stage is not None)
        if len(fitting) < len(stages):
            return None
        profile = self._profile
        return OperatorPlan(
            model=profile.model,
            layers=profile.layers,
            batch=self._batch,
            micro_batch=self._micro_batch,
            stages=fitting,
        )

    def _moved(
        self, borders: list[int], choices: list[Share], places: list[_StagePlace], best_s: float
    ) -> tuple[float, list[int], list[Share]] | None:
        """Returns the best plan with a border of the longest stage elsewhere, None where none is shorter."""
        best = None
        seconds = [self._stage(borders, choices, places, number)[0] for number in range(len(places))]
        longest = max(range(len(places)), key=seconds.__getitem__)
        for border in (longest, longest + 1):
            if not 0 < border < len(places):
                continue
            for size in SHIFTS:
                place = borders[border] + (size if border == longest else -size)
                if not borders[border - 1] < place < borders[border + 1]:
                    break
                others, given = list(borders), list(choices)
                others[border] = place
                # The operators that change stages are shared as their new neighbour is.
                if border == longest:
                    given[borders[border] : place] = [choices[borders[border] - 1]] * size
                else:
                    given[place : borders[border]] = [choices[borders[border]]] * size
                step_s = self._seconds(others, given, places)
                if step_s < best_s * (1 - 1e-6):
                    best, best_s = (step_s, others, given), step_s
        return best

    def _remixed(
        self, mixer: Mixer, borders: list[int], choices: list[Share], places: list[_StagePlace], best_s: float
    ) -> tuple[float, list[int], list[Share]] | None:
        """Returns the plan with operators' own choices in each stage, None where that is not shorter."""
        given = list(choices)
        for number, (begin, end) in enumerate(pairwise(borders)):
            best = self._stage(borders, given, places, number)[0]
            for found in self._priced(mixer, begin, end, choices[begin].devices, places[number]):
                seconds = self._at(begin, found, places[number])[0]
                if seconds < best * (1 - 1e-6):
                    best = seconds
                    given[begin:end] = found
        step_s = self._seconds(borders, given, places)
        return (step_s, list(borders), given) if step_s < best_s * (1 - 1e-6) else None

    def _priced(
        self, mixer: Mixer, begin: int, end: int, devices: int, place: _StagePlace
    ) -> Iterator[tuple[Share, ...]]:
        """Yields choices for prices of a byte: none, and then nearer to the least at which nothing is recomputed."""
        low, high, price = *PRICES, 0.0
        while high > 1.1 * low:
            found = mixer.choices(begin, end, devices, price, place.behind)
            if found is None:
                return
            yield tuple(found)
            stage = self._at(begin, tuple(found), place)[1]
            if stage is not None and not any(stage.recomputed):
                if not price:
                    return
                high = price
            elif price:
                low = price
            price = math.sqrt(low * high)

    def _seconds(self, borders: Sequence[int], choices: Sequence[Share], places: Sequence[_StagePlace]) -> float:
        seconds = [self._stage(borders, choices, places, number)[0] for number in range(len(places))]
        return pipeline_s(seconds, self._batch // self._micro_batch)

    def _stage(
        self, borders: Sequence[int], choices: Sequence[Share], places: Sequence[_StagePlace], number: int
    ) -> tuple[float, OperatorStage | None]:
        begin, end = borders[number], borders[number + 1]
        return self._at(begin, tuple(choices[begin:end]), places[number])

    def _at(self, begin: int, choices: tuple[Share, ...], place: _StagePlace) -> tuple[float, OperatorStage | None]:
        """Returns a micro-batch's seconds in a stage, infinite if it cannot fit, and the stage recomputing."""
        key = begin, choices, place
        if key not in self._known:
            empty = OperatorStage(
                begin=begin,
                devices=choices[0].devices,
                choices=choices,
                recomputed=tuple(False for _ in choices),
            )
            profile, micro_batch = self._profile, self._micro_batch
            stage = with_room(profile, self._starts, empty, micro_batch, place.behind, self._memory)
            seconds = float("inf")
            if stage is not None:
                try:
                    seconds = predict_stage(
                        profile,
                        stage,
                        micro_batch,
                        behind=place.behind,
                        receives_across=place.receives_across,
                        sends_across=place.sends_across,
                    ).micro_batch_s
                except ValueError:  # operators next to one another whose collectives were not profiled
                    stage = None
            self._known[key] = seconds, stage
        return self._known[key]
