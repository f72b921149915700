"""Stages that none takes longer than a given time: how far each number of them reaches with each number of devices.

From the last stage to the first: of all stages that are short enough and fit, the one that begins earliest leaves the
least to do, so that one table entry for each (stages, devices) is enough. That is exact but for what messages at a
border take, which may be less where fewer operators are in the stage; the moves that follow make up for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stronghold.planner.profiled.layouts import Sharing
from stronghold.planner.profiled.stage_table import StageTable


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A stage: the operators ``begin`` to ``end`` of a sharing."""

    begin: int
    end: int
    sharing: Sharing


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; a stage has a power of two of them, all in one node."""

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more (got {getattr(self, name)}); pass a whole number")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def sizes(self) -> list[int]:
        """Returns the numbers of devices that a stage may have."""
        return [2**power for power in range(self.devices_per_node.bit_length()) if 2**power <= self.devices_per_node]

    def least_stages(self, used: int) -> int:
        """Returns how many stages it takes at least to use the devices beside ``used``, counted from either end."""
        full, rest = divmod(self.devices - used, self.devices_per_node)
        return full * self.devices_per_node.bit_count() + rest.bit_count()

    def across(self, before: int, devices: int) -> tuple[bool, bool]:
        """Returns whether a stage after ``before`` devices gets from another node, and whether it sends to one.

        As Aceso has it, the last stage sends to another node too.
        """
        per = self.devices_per_node
        return before > 0 and before % per == 0, (before + devices) % per == 0


class Reach:
    """Stages over the operators of one model for one micro-batch; ``tables`` are the stages' by devices."""

    def __init__(self, tables: Mapping[int, Sequence[StageTable]], borders: Sequence[int], cluster: Cluster) -> None:
        self.tables, self.cluster = tables, cluster
        self._borders = list(borders)  # 0 first
        best = [
            min(devices * table.operator_s[number] for devices, some in tables.items() for table in some)
            for number in range(len(next(iter(tables.values()))[0].operator_s))
        ]
        self._work = [0.0, *accumulate(best)]
        """The device-seconds of the operators before each one, each of them shared as is best for it alone."""

    @property
    def least_s(self) -> float:
        """What no longest stage is below."""
        return self._work[-1] / self.cluster.devices

    def within(self, limit_s: float, most_stages: int) -> list[list[Draft]]:
        """Returns plans whose stages take ``limit_s`` at most, one for each number of stages that has one."""
        total, found = self.cluster.devices, []
        level: dict[int, tuple[int, tuple[Draft, ...]]] = {0: (len(self._work) - 1, ())}
        for behind in range(most_stages):
            after: dict[int, tuple[int, tuple[Draft, ...]]] = {}
            done: tuple[float, tuple[Draft, ...]] | None = None
            for used, (end, later) in level.items():
                for size, tables in self.tables.items():
                    now = used + size
                    if now > total or used % self.cluster.devices_per_node + size > self.cluster.devices_per_node:
                        continue
                    across = self.cluster.across(total - now, size)
                    if now == total:
                        last = min(
                            (table.seconds(0, end, behind, across, limit_s), n) for n, table in enumerate(tables)
                        )
                        if last[0] <= limit_s and (done is None or last[0] < done[0]):
                            done = last[0], (Draft(begin=0, end=end, sharing=tables[last[1]].sharing), *later)
                        continue
                    reached = self._furthest(tables, end, behind, across, limit_s, self.cluster.least_stages(now))
                    if reached is None or self._work[reached[0]] > limit_s * (total - now):
                        continue
                    if now not in after or reached[0] < after[now][0]:
                        draft = Draft(begin=reached[0], end=end, sharing=reached[1])
                        after[now] = reached[0], (draft, *later)
            if done is not None:
                found.append(list(done[1]))
            level = _undominated(after)
            if not level:
                break
        return found

    def _furthest(
        self,
        tables: Sequence[StageTable],
        end: int,
        behind: int,
        across: tuple[bool, bool],
        limit_s: float,
        left: int,
    ) -> tuple[int, Sharing] | None:
        """Returns the earliest operator with which a stage up to ``end`` can begin, and the sharing for it.

        It leaves ``left`` operators at least to the stages before it.
        """
        borders = self._borders
        first, last = bisect_left(borders, left), bisect_left(borders, end) - 1
        best: tuple[int, Sharing] | None = None
        for table in tables:
            high = last + 1 if best is None else best[0]
            if high <= first or table.seconds(borders[high - 1], end, behind, across, limit_s) > limit_s:
                continue
            low, high = first - 1, high - 1
            while high - low > 1:
                middle = (low + high) // 2
                if table.seconds(borders[middle], end, behind, across, limit_s) <= limit_s:
                    high = middle
                else:
                    low = middle
            best = high, table.sharing
        return None if best is None else (borders[best[0]], best[1])


def _undominated(level: Mapping[int, tuple[int, tuple[Draft, ...]]]) -> dict[int, tuple[int, tuple[Draft, ...]]]:
    """Drops what another one reaches, or more than that, with fewer devices."""
    found: dict[int, tuple[int, tuple[Draft, ...]]] = {}
    furthest: int | None = None
    for used, one in sorted(level.items()):
        if furthest is None or one[0] < furthest:
            found[used], furthest = one, one[0]
    return found
