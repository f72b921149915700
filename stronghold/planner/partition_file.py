"""vPipe's file of a partition: ``{"partition": [26, 23], "recompute_ratio": [1, 1]}`` (Zhao et al. 2022)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stronghold.formats.whole_file import write_whole
from stronghold.planner.partition import Partition
from stronghold.planner.stage_costs import recomputed_layers


@dataclass(frozen=True, kw_only=True)
class PartitionFile:
    """The layers of each stage, and the part of each stage's layers, taken from its end, that is recomputed.

    As many layers are recomputed as the ratio times the stage's layers, rounded down. Raises ValueError for a stage
    without layers, a ratio that is not from 0 to 1, or not as many ratios as stages.
    """

    partition: tuple[int, ...]
    recompute_ratio: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.partition or not all(_is_number(size, int) and size >= 1 for size in self.partition):
            raise ValueError(
                f"partition must be whole numbers of layers, none below 1 (got {list(self.partition)}); "
                "give each stage one"
            )
        if not all(_is_number(ratio, int, float) and 0 <= ratio <= 1 for ratio in self.recompute_ratio):
            raise ValueError(f"recompute_ratio must be numbers from 0 to 1 (got {list(self.recompute_ratio)})")
        if len(self.partition) != len(self.recompute_ratio):
            raise ValueError(
                f"partition and recompute_ratio must have a number for each stage (got {len(self.partition)} and "
                f"{len(self.recompute_ratio)}); make them as long as one another"
            )

    @property
    def recomputed(self) -> tuple[int, ...]:
        """How many layers are recomputed at the end of each stage."""
        return tuple(map(recomputed_layers, self.recompute_ratio, self.partition))


def read_partition(path: str | Path) -> PartitionFile:
    """Reads the file at ``path``. Raises ValueError, naming it, where it is not there or does not hold a partition."""
    try:
        return partition_of(json.loads(Path(path).read_bytes()))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no partition: {error}; write one such as "
            '{"partition": [26, 23], "recompute_ratio": [1, 1]}'
        ) from error


def partition_of(found: object) -> PartitionFile:
    """Returns the partition that ``found`` is as the file has it. Raises ValueError where it is none."""
    if not isinstance(found, Mapping) or set(found) != {"partition", "recompute_ratio"}:
        named = f"keys {sorted(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ValueError(f"it must be an object of partition and recompute_ratio alone (got {named})")
    for name, value in found.items():
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list of numbers (got {value!r})")
    return PartitionFile(**{name: tuple(value) for name, value in found.items()})


def object_of(partition: Partition) -> dict[str, list[Any]]:
    """Returns the stages of ``partition`` as the file has them."""
    ratios = [stage.recompute_ratio for stage in partition.stages]
    return {
        "partition": [stage.layers for stage in partition.stages],
        "recompute_ratio": [int(ratio) if ratio in (0, 1) else ratio for ratio in ratios],
    }


def write_partition(path: str | Path, partition: Partition) -> None:
    """Writes the stages of ``partition``, which read_partition gives back, the file whole. Raises OSError."""
    write_whole(path, json.dumps(object_of(partition)) + "\n")


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
