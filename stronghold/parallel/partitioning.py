"""Which layers go to which stage."""

from __future__ import annotations

from collections.abc import Sequence

from stronghold.errors import ParallelError
from stronghold.parallel.row import Row
from stronghold.plan.pipeline import Pipeline


def choose_sizes(row: Row, order: Pipeline, balance: str | Sequence[int]) -> list[int]:
    """Returns the number of layers of each stage. Raises ParallelError where they do not make up the row."""
    layers, stages = len(row.layers), order.stages
    if stages > layers:
        raise ParallelError(
            f"each stage needs at least one layer (got stages={stages}, layers={layers}); pass at most {layers} stages"
        )
    if isinstance(balance, str):
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]
    sizes = list(balance)
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        raise ParallelError(
            f"a partition must give each of {stages} stages a layer or more, and {layers} in all (got {sizes}, which "
            f"are {len(sizes)} stages and {sum(sizes)} layers); pass other numbers, or balance='time'"
        )
    return sizes
