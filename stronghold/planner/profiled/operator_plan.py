"""A plan over operators: stages, how each operator is shared, and which are recomputed; as JSON, Aceso's keys."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stronghold.formats.whole_file import write_whole
from stronghold.planner.profiled.layouts import Share


@dataclass(frozen=True, kw_only=True)
class OperatorStage:
    """The operators ``begin`` to ``end`` on ``devices``: each one's choice, and whether it is recomputed."""

    begin: int
    devices: int
    choices: tuple[Share, ...]
    recomputed: tuple[bool, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.choices)


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """Stages one after the other, and the samples of a step and of a micro-batch, over all replicas.

    Raises ValueError for stages without operators, operators whose choice is not the stage's devices, and a batch that
    is not a whole number of micro-batches.
    """

    model: str
    layers: int
    batch: int
    micro_batch: int
    stages: tuple[OperatorStage, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batch <= self.batch or self.batch % self.micro_batch:
            raise ValueError(
                f"the batch must be a whole number of micro-batches (got {self.batch} and {self.micro_batch}); "
                "change one of them"
            )
        if not self.stages:
            raise ValueError("a plan must have a stage (got none); give it one")
        for number, stage in enumerate(self.stages):
            if not stage.choices or len(stage.choices) != len(stage.recomputed):
                raise ValueError(
                    f"stage {number} must have operators and say of each whether it is recomputed (got "
                    f"{len(stage.choices)} choices and {len(stage.recomputed)} to recompute); give one of each"
                )
            for choice in stage.choices:
                if min(choice.degree, choice.replicas) < 1 or choice.devices != stage.devices:
                    raise ValueError(
                        f"an operator of stage {number} must use the stage's {stage.devices} devices (got "
                        f"{choice.degree} times {choice.replicas}); make degree times replicas as many"
                    )

    @property
    def devices(self) -> int:
        return sum(stage.devices for stage in self.stages)

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan under the keys of Aceso's files, so that its runtime finds what it reads of a plan."""
        name, _, size = self.model.partition("_")
        stages = self.stages
        return {
            "model_name": name,
            "model_size": size,
            "num_layers": self.layers,
            "global_batch_size": self.batch,
            "micro_batch_size": self.micro_batch,
            "num_stages": len(stages),
            "num_gpus": [stage.devices for stage in stages],
            "checkpoint_activations": [any(stage.recomputed) for stage in stages],
            "resharding_stages": [len(set(stage.choices)) > 1 for stage in stages],
            "num_ops_in_each_stage": [len(stage.choices) for stage in stages],
            "model_parallel_size_of_each_op": [[one.degree for one in stage.choices] for stage in stages],
            "data_parallel_size_of_each_op": [[one.replicas for one in stage.choices] for stage in stages],
            "recompute_ops": [[int(one) for one in stage.recomputed] for stage in stages],
            "algo_of_each_op": [[one.algorithm for one in stage.choices] for stage in stages],
        }

    def write(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Writes the plan as JSON, with ``more`` beside it, the file whole. Raises OSError."""
        write_whole(path, json.dumps({**self.to_dict(), **more}) + "\n")


def read_operator_plan(path: str | os.PathLike[str]) -> OperatorPlan:
    """Returns the plan that :meth:`OperatorPlan.write` wrote, or that Aceso did. Raises ValueError where it is none."""
    try:
        found = json.loads(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it must be an object (got a {type(found).__name__})")
        layers = found.get("num_layers")
        return OperatorPlan(
            model=f"{found['model_name']}_{found['model_size']}",
            layers=1 if isinstance(layers, list) else _whole("num_layers", layers),  # of Wide-ResNet: its blocks
            batch=_whole("global_batch_size", found["global_batch_size"]),
            micro_batch=_whole("micro_batch_size", found["micro_batch_size"]),
            stages=tuple(_stages(found)),
        )
    except (OSError, KeyError, RecursionError, TypeError, ValueError) as error:
        told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{os.fspath(path)!r} is no plan over operators: {told}; make one: stronghold plan --profile DIR -o FILE"
        ) from error


def _stages(found: dict[str, Any]) -> list[OperatorStage]:
    keys = ("model_parallel_size_of_each_op", "data_parallel_size_of_each_op", "algo_of_each_op", "recompute_ops")
    stages, begin = [], 0
    sizes = [_whole("num_ops_in_each_stage", size) for size in found["num_ops_in_each_stage"]]
    if found.get("num_stages", len(sizes)) != len(sizes):
        raise ValueError(f"num_stages must be the number of stages (got {found['num_stages']!r} for {len(sizes)})")
    for name in ("num_gpus", *keys):
        if len(found[name]) != len(sizes):
            raise ValueError(f"{name} must have an entry for each stage (got {len(found[name])} for {len(sizes)})")
    for number, size in enumerate(sizes):
        columns: list[Sequence[int]] = [found[key][number] for key in keys]
        for key, column in zip(keys, columns, strict=True):
            if len(column) != size:
                raise ValueError(f"{key} of stage {number} must have {size} entries (got {len(column)})")
            for value in column:
                _whole(key, value)
        degrees, replicas, algorithms, recomputed = columns
        stages.append(
            OperatorStage(
                begin=begin,
                devices=_whole("num_gpus", found["num_gpus"][number]),
                choices=tuple(map(Share, degrees, replicas, algorithms)),
                recomputed=tuple(map(bool, recomputed)),
            )
        )
        begin += size
    return stages


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number (got {value!r})")
    return value
