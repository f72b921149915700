"""A profile: each operator's seconds and bytes, by the samples it computes and by how devices share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stronghold.planner.profiled.device_links import Links
from stronghold.planner.profiled.families import Family
from stronghold.planner.profiled.layouts import Share


class Costs(NamedTuple):
    """What one operator takes on one device for one micro-batch.

    ``input_bytes`` and ``output_bytes`` are all that crosses the border before and after it, residual connections with
    it. The reserved bytes are what the allocator holds beside the tensors in the forward and in the backward pass.
    """

    forward_s: float
    backward_s: float
    input_bytes: float
    output_bytes: float
    weight_bytes: float
    activation_bytes: float
    reserved_forward_bytes: float
    reserved_backward_bytes: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that a profile tells of one model.

    ``operators`` are the names of the whole model's in the order in which it computes them, and ``rows`` the line of
    the files that each has. ``costs`` are those of each line, by (samples, degree, algorithm).
    """

    model: str
    family: Family
    layers: int
    operators: Sequence[str]
    rows: Sequence[int]
    costs: Mapping[tuple[int, int, int], Sequence[Costs]]
    links: Links

    def costs_of(self, samples: int, choice: Share) -> Sequence[Costs]:
        """Returns the costs of the files' lines for one micro-batch of ``samples``, all replicas together.

        Raises ValueError where the replicas cannot share it evenly, or where it was not profiled.
        """
        each, left = divmod(samples, choice.replicas)
        found = None if left else self.costs.get((each, choice.degree, choice.algorithm))
        if found is None:
            has = sorted({f"{each}x{degree}" for each, degree, _ in self.costs}, key=_numbers)
            raise ValueError(
                f"the profile of {self.model} must have the samples and the degree of each operator (got a micro-batch "
                f"of {samples} over {choice.replicas} replicas, degree {choice.degree}, algorithm {choice.algorithm}; "
                f"it has samples x degree {', '.join(has)}); change the plan, or profile that as well"
            )
        return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))
