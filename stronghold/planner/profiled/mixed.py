"""Operators of one stage that are shared in different ways: the fastest such choices, as a shortest path."""

from __future__ import annotations

import math

from stronghold.planner.profiled.layouts import Share, reshard
from stronghold.planner.profiled.profile import Profile


class Mixer:
    """Finds choices for the operators of stages of one micro-batch; the family's layouts must be known."""

    def __init__(self, profile: Profile, micro_batch: int) -> None:
        self._profile, self._micro_batch = profile, micro_batch
        self._tables = {
            choice: profile.costs_of(micro_batch, choice)
            for each, degree, algorithm in sorted(profile.costs)
            if micro_batch % each == 0
            for choice in [Share(degree, micro_batch // each, algorithm)]
        }
        self._known: dict[tuple[int, int, Share, Share], float] = {}

    def choices(self, begin: int, end: int, devices: int, byte_s: float, behind: int) -> list[Share] | None:
        """Returns a choice for each of the operators ``begin`` to ``end`` on ``devices``, None where there are none.

        The path is the shortest in the operators' seconds, the collectives between them, and ``byte_s`` seconds for
        each byte that they hold, with micro-batches of ``behind`` further stages under way.
        """
        profile = self._profile
        offered = [choice for choice in self._tables if choice.devices == devices]
        paths: dict[Share, float] = dict.fromkeys(offered, 0.0)
        backs: list[dict[Share, Share]] = []
        for number in range(begin, end):
            share, row = profile.family.share(profile.operators[number]), profile.rows[number]
            after: dict[Share, float] = {}
            back: dict[Share, Share] = {}
            for choice in offered:
                costs, least, found = self._tables[choice][row], math.inf, None
                for before, so_far in paths.items():
                    cost = so_far + (self._between(number, before, choice) if number > begin else 0.0)
                    if cost < least:
                        least, found = cost, before
                if found is not None:
                    held = costs.weight_bytes * profile.family.copies + share * costs.activation_bytes * (behind + 1)
                    after[choice] = least + costs.forward_s + costs.backward_s + byte_s * held
                    back[choice] = found
            if not after:
                return None
            paths = after
            backs.append(back)
        choice = min(paths, key=paths.__getitem__)
        chosen = [choice]
        for back in backs[:0:-1]:
            choice = back[choice]
            chosen.append(choice)
        return chosen[::-1]

    def _between(self, number: int, before: Share, choice: Share) -> float:
        """Returns the seconds of the collectives before an operator, infinite where they were not profiled."""
        profile = self._profile
        key = profile.rows[number - 1], profile.rows[number], before, choice
        if key not in self._known:
            layouts = profile.family.layouts
            assert layouts is not None
            change = reshard(
                layouts(profile.operators[number - 1], before)[1], layouts(profile.operators[number], choice)[0]
            )
            size_bytes = self._tables[choice][profile.rows[number]].input_bytes
            times = (0.0, 0.0) if change is None else profile.links.reshard_s(change, size_bytes)
            self._known[key] = math.inf if times is None else sum(times)
        return self._known[key]
