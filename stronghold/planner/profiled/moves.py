"""Moves that make a plan's longest stage shorter, while stages are looked up in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stronghold.planner.profiled.layouts import Sharing
from stronghold.planner.profiled.predict import pipeline_s
from stronghold.planner.profiled.reach import Cluster, Draft
from stronghold.planner.profiled.stage_table import StageTable

FURTHEST = 14
"""By how many operators a border moves at most at one time: a layer and one more."""


class Bench:
    """Takes the time of drafts of one micro-batch, and remembers what it found of each stage."""

    def __init__(self, tables: Mapping[Sharing, StageTable], cluster: Cluster, micro_batches: int) -> None:
        self.tables, self.cluster, self.micro_batches = tables, cluster, micro_batches
        self._known: dict[tuple[int, int, Sharing, int, tuple[bool, bool]], float] = {}

    def stages_s(self, drafts: Sequence[Draft]) -> list[float]:
        """Returns each stage's seconds for a micro-batch, infinite where it cannot fit."""
        found, before = [], 0
        for number, draft in enumerate(drafts):
            across = self.cluster.across(before, draft.sharing.devices)
            before += draft.sharing.devices
            key = draft.begin, draft.end, draft.sharing, len(drafts) - 1 - number, across
            if key not in self._known:
                table = self.tables[draft.sharing]
                self._known[key] = table.seconds(draft.begin, draft.end, len(drafts) - 1 - number, across)
            found.append(self._known[key])
        return found

    def step_s(self, drafts: Sequence[Draft]) -> float:
        return pipeline_s(self.stages_s(drafts), self.micro_batches)

    def improved(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Returns the drafts after all moves that helped: borders, and what stages' devices share."""
        best = list(drafts)
        best_s = self._rank(best)
        while True:
            stages_s = best_s[1]
            order = sorted(range(len(best)), key=lambda n: -self.stages_s(best)[n])
            for longest in order[:2]:
                moved = min(self._moves(best, longest), key=self._rank, default=best)
                if self._rank(moved) < best_s:
                    best, best_s = moved, self._rank(moved)
                    break
            else:
                return best
            assert best_s[1] != stages_s

    def _rank(self, drafts: Sequence[Draft]) -> tuple[float, list[float]]:
        """Orders drafts by a step's seconds, and those that are as long by their longest stages."""
        stages_s = sorted(self.stages_s(drafts), reverse=True)
        return round(pipeline_s(stages_s, self.micro_batches), 9) if stages_s[0] < 1e300 else 1e300, stages_s

    def _moves(self, drafts: list[Draft], longest: int) -> Iterator[list[Draft]]:
        for sharing in self.tables:
            for number in {longest, max(longest - 1, 0), min(longest + 1, len(drafts) - 1)}:
                if sharing.devices == drafts[number].sharing.devices and sharing is not drafts[number].sharing:
                    yield [*drafts[:number], replace(drafts[number], sharing=sharing), *drafts[number + 1 :]]
        for target in range(len(drafts)):
            if target != longest:
                for size in range(1, FURTHEST + 1):
                    if (moved := _shifted(drafts, longest, target, size)) is not None:
                        yield moved


def _shifted(drafts: Sequence[Draft], source: int, target: int, size: int) -> list[Draft] | None:
    """Returns the drafts with ``size`` operators handed on from ``source`` to ``target``, through those between."""
    moved = list(drafts)
    step = 1 if target > source else -1
    for border in range(source, target, step):  # between border and border + step
        left, right = min(border, border + step), max(border, border + step)
        place = moved[left].end - step * size
        if not moved[left].begin < place < moved[right].end:
            return None
        moved[left] = replace(moved[left], end=place)
        moved[right] = replace(moved[right], begin=place)
    return moved
