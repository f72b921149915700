"""What recorded operators take on a measured machine, each record found once for each pace: those of a step, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import Pace, op_rates
from stronghold.planner.op_costs import Op, OpRates

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation


class OpSeconds:
    """Answers for one of so many ``processes`` that compute on ``machine`` at the same time, where that is a host."""

    def __init__(self, machine: MachineFile, processes: int = 1) -> None:
        self._machine, self._processes = machine, processes
        self._rates: dict[Pace, OpRates] = {}
        self._known: dict[tuple[Pace, int], tuple[Counter[Op], float]] = {}
        """With the operators themselves: others could have their id once they are gone."""

    def of(self, ops: Counter[Op], pace: Pace) -> float:
        """Returns the seconds of all ``ops``, which must not change any more."""
        if (pace, id(ops)) not in self._known:
            self._known[pace, id(ops)] = ops, self._uncached(ops, pace)
        return self._known[pace, id(ops)][1]

    def of_sum(self, length_bytes: int, dtype: str, pace: Pace) -> float:
        """Returns what adding so many bytes to as many takes."""
        return self._uncached({Op("other", dtype, (), 0, 3 * length_bytes): 1}, pace)

    def of_copy(self, length_bytes: int, dtype: str, pace: Pace) -> float:
        """Returns what copying so many bytes on the device takes, nothing for none."""
        return self._uncached({Op("other", dtype, (), 0, 2 * length_bytes): 1}, pace) if length_bytes else 0.0

    def _uncached(self, ops: Mapping[Op, int], pace: Pace) -> float:
        if pace not in self._rates:
            self._rates[pace] = op_rates(self._machine, pace, self._processes)
        return self._rates[pace].seconds(ops)


def computing_s(of: ModelComputation, seconds: OpSeconds, micro_batch: int | None) -> float:
    """Returns what a step computes, over micro-batches of so many samples, if no layer is recomputed."""
    root, runs = of.root, [of.layer(number, micro_batch) for number in range(len(of.group_of))]
    outside = (root.before, root.behind, root.behind_backward, root.before_backward)
    within = (
        of.batch / run.samples * (seconds.of(run.forward, "likely") + seconds.of(run.backward, "likely"))
        for run in runs
    )
    return sum(seconds.of(ops, "likely") for ops in outside) + sum(within)
