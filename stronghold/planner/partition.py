"""Which layers go to which stage: an exact minimum, by dynamic programming over where the row of layers is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from stronghold.errors import BudgetError
from stronghold.planner.cuts import cut, fastest, least_bytes, missing_bytes, nearest
from stronghold.planner.offloaded_stages import RESOURCES, OffloadedStages
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.simulate import Simulation, simulate
from stronghold.planner.stage_costs import LayerCost, StageCosts, ratio_of, spread_of
from stronghold.spans import Span
from stronghold.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a partition: ``layers`` layers from ``first`` on, the last ``recomputed`` of them recomputed.

    Seconds are of one micro-batch, ``backward_s`` with the recomputation, and both with what the stage waits for where
    it is offloaded; ``computing_s`` are those of computing alone. ``longest`` says what holds the stage up most:
    "computing", or "fetches", "gradients" or "updates" beside it. ``memory_bytes`` is the stage's peak.
    """

    first: int
    layers: int
    recomputed: int
    forward_s: float
    backward_s: float
    memory_bytes: int
    computing_s: float = 0.0
    spread_s: float = 0.0
    """Seconds between the quartiles of what its layers were measured to compute."""
    longest: str = RESOURCES[0]

    @property
    def time_s(self) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def recompute_ratio(self) -> float:
        """The part of the stage's layers that is recomputed, as vPipe's file has it."""
        return ratio_of(self.recomputed, self.layers)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A row of layers cut into stages.

    ``ideal_s`` is what each stage took if the time of all layers, without recomputation, divided evenly. ``spread`` is
    the part of the layers' time by which measurements of it differ, from quartile to quartile.
    """

    stages: tuple[StagePlan, ...]
    ideal_s: float
    spread: float = 0.0

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest stage for one micro-batch: while the pipeline is full, all stages take as long."""
        return max(stage.time_s for stage in self.stages)

    @property
    def over_ideal(self) -> float:
        """How much longer the slowest stage takes than the ideal: 0.1 is a tenth."""
        return self.slowest_s / self.ideal_s - 1 if self.ideal_s else 0.0

    @property
    def idle_shares(self) -> list[float]:
        """The share of its time for which each stage waits for the slowest while the pipeline is full."""
        return [1 - stage.time_s / self.slowest_s if self.slowest_s else 0.0 for stage in self.stages]


def partition(
    layers: Sequence[LayerCost],
    pipeline: Pipeline,
    *,
    balance: str | Sequence[int] = "time",
    memory_bytes: int | Sequence[int] | None = None,
    recompute_ratio: float | Sequence[float] | None = None,
    receive_buffers: bool = False,
    offloaded: OffloadedStages | None = None,
    near: Sequence[int] | None = None,
) -> Partition:
    """Cuts a row of layers into the pipeline's stages, none of them empty.

    - ``balance="time"`` takes the least time of the slowest stage of all partitions that fit ``memory_bytes``.
    - ``balance="memory"`` takes the least bytes of the fullest stage, and of the partitions that have it the fastest.
    - A list of numbers of layers is taken as it is.

    ``memory_bytes`` is what a stage may take, one number or one for each stage; stages on the same device have each
    their own. ``recompute_ratio`` is the part of a stage's layers, taken from its end, that runs forward again in the
    backward pass instead of keeping activations, one number or one for each stage; by default each stage recomputes as
    few layers as fit its memory. A stage that holds H micro-batches (``pipeline.held()``) has the peak

        weights + H · (activations of layers that are kept + inputs of those recomputed)
        + the largest activations of a layer that is recomputed

    since layers are recomputed one at a time; where stages are ``offloaded``, a window's slots and what else is on the
    device take the weights' place. With ``receive_buffers`` what the stage receives from either neighbour
    is added for every micro-batch of a step, as torch.distributed.pipelining allocates it when it begins.

    Where layers were measured with a spread, a partition whose slowest stage is faster by no more than the spread of
    all layers' time is no better. Of all that are as good in this sense the one is taken that moves the fewest layers
    across the cuts of the partition ``near``, the layers of each stage, by default as many in each; so what noise
    there is in the measurements moves no cut that real differences between layers do not.

    The time of a stage is that of its layers' computation; where stages are ``offloaded``, with what they wait for
    their fetches, gradients and updates (:class:`OffloadedStages`). Raises ValueError for more stages than layers, and
    for a list that does not fit stages or layers; BudgetError where nothing fits the memory, with the least that would
    do.
    """
    stages = pipeline.stages
    if len(layers) < stages:
        raise ValueError(
            f"each stage needs at least one layer (got stages={stages}, layers={len(layers)}); "
            f"pass at most {len(layers)} stages"
        )
    limits = [math.inf] * stages if memory_bytes is None else _for_each(memory_bytes, stages, "memory_bytes", math.inf)
    ratios = None if recompute_ratio is None else _for_each(recompute_ratio, stages, "recompute_ratio", 1)
    if offloaded is not None and len(offloaded.layers) != len(layers):
        raise ValueError(
            f"what is offloaded must have an entry for each layer (got {len(offloaded.layers)} for {len(layers)} "
            "layers); pass as many"
        )
    costs = StageCosts(
        layers,
        pipeline.held(),
        ratios,
        micro_batches=pipeline.micro_batches,
        buffered=pipeline.micro_batches if receive_buffers else 0,
        offloaded=offloaded,
    )
    return cut_into_stages(costs, pipeline, limits, balance=balance, near=near)


def cut_into_stages(
    costs: StageCosts,
    pipeline: Pipeline,
    limits: Sequence[float],
    *,
    balance: str | Sequence[int] = "time",
    near: Sequence[int] | None = None,
) -> Partition:
    """Returns the partition of a row whose costs are known, where each stage may take the bytes of ``limits``."""
    layers, stages, spread = costs.layers, pipeline.stages, spread_of(costs.layers)
    if not isinstance(balance, str):
        cuts = [0, *accumulate(_checked_sizes(balance, stages, len(layers)))]
        _check_memory(costs, limits, cuts)
    elif balance in ("time", "memory"):
        if balance == "memory":
            fullest_bytes, _ = cut(costs, limits, least_bytes)
            limits = [min(limit, fullest_bytes) for limit in limits]
        slowest_s, cuts = fastest(costs, limits)
        if not cuts:
            raise _nothing_fits(costs, pipeline, limits)
        if spread:
            sizes = equal_sizes(len(layers), stages) if near is None else _checked_sizes(near, stages, len(layers))
            cuts = nearest(costs, limits, (1 + spread) * slowest_s, [*accumulate(sizes)])
    else:
        raise ValueError(f"balance must be 'time', 'memory' or a list of numbers of layers (got {balance!r})")
    return Partition(
        stages=tuple(_stage(costs, stage, *ends, limits[stage]) for stage, ends in enumerate(pairwise(cuts))),
        ideal_s=float(costs.forward_s[-1] + costs.backward_s[-1]) / stages,
        spread=spread,
    )


def played(
    found: Partition, pipeline: Pipeline, link_s: float | Sequence[float], spans: list[Span] | None = None
) -> Simulation:
    """Plays a step of a partition; ``link_s`` and ``spans`` are as for ``simulate``."""
    forward_s, backward_s = ([getattr(stage, name) for stage in found.stages] for name in ("forward_s", "backward_s"))
    return simulate(pipeline, forward_s, backward_s, link_s, spans)


def equal_sizes(layers: int, stages: int) -> list[int]:
    """Returns as many layers for each stage, one more for the first ones where they do not divide."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _stage(costs: StageCosts, stage: int, first: int, end: int, limit_bytes: float) -> StagePlan:
    run = costs.runs(stage, first, end)
    recomputed = int(run.recomputed(limit_bytes))
    assert recomputed <= end - first, "a stage that does not fit"
    times = run.times(np.array(recomputed))
    return StagePlan(
        first=first,
        layers=end - first,
        recomputed=recomputed,
        forward_s=float(times.forward_s),
        backward_s=float(times.backward_s),
        memory_bytes=int(run.memory_bytes(np.array(recomputed))),
        computing_s=float(times.computing_s),
        spread_s=sum(sum(layer.spread_s) for layer in costs.layers[first:end])
        + sum(layer.spread_s[0] for layer in costs.layers[end - recomputed : end]),
        longest=RESOURCES[int(times.longest)],
    )


def _nothing_fits(costs: StageCosts, pipeline: Pipeline, limits: Sequence[float]) -> BudgetError:
    missing = int(cut(costs, limits, missing_bytes)[0])
    given = " to ".join(format_bytes(int(limit)) for limit in sorted({min(limits), max(limits)}))
    return BudgetError(
        f"no partition of {len(costs.layers)} layers into {len(limits)} stages fits the memory (got "
        f"memory_bytes={given} for each, and {pipeline.schedule} with {pipeline.micro_batches} micro-batches, of which "
        f"a stage holds up to {max(costs.held)}); give each {missing} bytes more ({format_bytes(missing)}), or pass "
        "more stages or smaller micro-batches"
    )


def _check_memory(costs: StageCosts, limits: Sequence[float], cuts: Sequence[int]) -> None:
    for stage, (first, end) in enumerate(pairwise(cuts)):
        least = int(costs.runs(stage, first, end).least_bytes())
        if least > limits[stage]:
            raise BudgetError(
                f"each stage must fit its memory (stage {stage}, layers {first} to {end - 1} with {costs.held[stage]} "
                f"micro-batches held, needs {least} bytes, {format_bytes(least)}, and may take {int(limits[stage])}); "
                "give it fewer layers, or pass balance='memory'"
            )


def _checked_sizes(balance: Sequence[int], stages: int, layers: int) -> list[int]:
    sizes = list(balance)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
        raise ValueError(
            f"a partition must be whole numbers of layers, none below 1 (got {sizes}); give each stage one"
        )
    if len(sizes) != stages:
        raise ValueError(
            f"a partition must have a number of layers for each stage (got {len(sizes)} in {sizes}, stages={stages}); "
            f"pass {stages} numbers"
        )
    if sum(sizes) != layers:
        raise ValueError(
            f"a partition must sum to the number of layers (got {sizes}, which sum to {sum(sizes)}, layers={layers}); "
            f"{'take away' if sum(sizes) > layers else 'add'} {abs(sum(sizes) - layers)}"
        )
    return sizes


def _for_each(value: float | Sequence[float], stages: int, name: str, most: float) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(values) != stages or not all(0 <= x <= most for x in values):
        raise ValueError(
            f"{name} must be one number, or one for each of the {stages} stages, "
            f"{'none negative' if most == math.inf else f'from 0 to {most}'} (got {value!r}); pass as many"
        )
    return values
