"""Which parameters of each stage are trained: by that follows what has a gradient that passes between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from stronghold.distributed.processes import Processes
from stronghold.distributed.tied import Use

ByStage = Mapping[int, Mapping[str, bool]]
"""Whether each parameter is trained, by its name in its stage, for stages by their number."""


class Trained:
    """The parameters of this process's ``stages`` that are trained, which may change from batch to batch.

    ``shared`` is where those are that several processes have.
    """

    def __init__(self, stages: Mapping[int, nn.Module], shared: Sequence[Sequence[Use]]) -> None:
        self._stages, self._shared = dict(stages), shared
        self._known = self._now()

    def _now(self) -> ByStage:
        return {
            number: {name: parameter.requires_grad for name, parameter in stage.named_parameters()}
            for number, stage in self._stages.items()
        }

    def changed(self) -> bool:
        """Whether others are trained here than when this was made, or last told to all."""
        return self._now() != self._known

    def of_all(self, processes: Processes) -> ByStage:
        """Returns which parameters of all stages are trained. To be asked for by all processes at once.

        Raises ParallelError where they are others in one replica than in another, and where a parameter that stages
        share is trained in one and frozen in another.
        """
        now = self._now()
        found: dict[int, Mapping[str, bool]] = {}
        for stages in processes.all_gather_object(now):
            for number, trained in stages.items():
                if found.setdefault(number, trained) != trained:
                    changed = [name for name, trains in trained.items() if found[number].get(name) != trains]
                    processes.refuse(
                        f"all replicas must train the same parameters (got {', '.join(changed[:4])} of stage {number} "
                        "frozen in some); set requires_grad to the same in each"
                    )
        for uses in self._shared:
            states = ["trained" if found[use.stage][use.name] else "frozen" for use in uses]
            if len({*states}) > 1:
                got = " and ".join(f"{use.whole_name} {state}" for use, state in zip(uses, states, strict=True))
                processes.refuse(
                    f"a parameter that stages share must be trained in all of them, or in none (got {got}, which are "
                    "one); set requires_grad to the same by each of these names"
                )
        self._known = now
        return found
