"""How long a step of a model in stages takes, where its cut is the partition's, and the least that it can take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from stronghold.planner.cuts import cut, furthest, missing_bytes
from stronghold.planner.offloaded_stages import OffloadedStages
from stronghold.planner.partition import Partition, cut_into_stages, equal_sizes, played
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.simulate import Simulation, lane_of
from stronghold.planner.stage_costs import LayerCost, StageCosts
from stronghold.spans import Span

LOOKED_AT = 2**18
"""Of so many stages times the square of layers every partition is looked at, in milliseconds, before none is to fit."""


@dataclass(frozen=True, kw_only=True)
class StagedWork:
    """What a step of a model in stages consists of under one choice of settings.

    ``layers`` are of one micro-batch. Stages are ``offloaded``, or all their layers resident, and then updated behind
    their process's last pass in ``update_s`` of each layer. A stage may take ``memory_bytes``. Activations of all
    layers are kept or, with ``is_kept`` False, none are; with None each stage recomputes as few layers as fit its
    memory, or the part of them that ``ratios`` give. ``link_s`` is what an activation takes into each layer where that
    is another process's first one, and ``shared_s`` what gradients of parameters take that several stages share, once
    a step.
    """

    layers: Sequence[LayerCost]
    pipeline: Pipeline
    memory_bytes: float
    is_kept: bool | None
    link_s: Sequence[float]
    offloaded: OffloadedStages | None = None
    update_s: Sequence[float] = ()
    shared_s: float = 0.0
    ratios: Sequence[float] | None = None

    @cached_property
    def costs(self) -> StageCosts:
        pipeline = self.pipeline
        ratios = self.ratios if self.is_kept is None else [0.0 if self.is_kept else 1.0] * pipeline.stages
        return StageCosts(
            self.layers,
            pipeline.held(),
            ratios,
            micro_batches=pipeline.micro_batches,
            buffered=pipeline.micro_batches,
            offloaded=self.offloaded,
        )


@dataclass(frozen=True, kw_only=True)
class StagedStep:
    """One step in stages: where the row is cut, when the processes compute, and the seconds of all of it."""

    partition: Partition
    simulation: Simulation
    step_s: float


def staged_step(work: StagedWork, sizes: Sequence[int] | None = None) -> StagedStep:
    """Returns the step of the partition whose slowest stage is the fastest, or of stages of these ``sizes``.

    It ends when the last process has updated what is resident there. Raises BudgetError where no partition fits.
    """
    limit_bytes = math.inf if work.memory_bytes == math.inf else int(work.memory_bytes)
    found = cut_into_stages(
        work.costs,
        work.pipeline,
        [limit_bytes] * work.pipeline.stages,
        balance="time" if sizes is None else sizes,
    )
    simulation = played(found, work.pipeline, _links_s(work, found))
    ends_s = map(sum, zip(simulation.ends_s, _updates_s(work, found), strict=True))
    return StagedStep(partition=found, simulation=simulation, step_s=max(ends_s) + work.shared_s)


def spans_of(work: StagedWork, step: StagedStep) -> list[Span]:
    """Returns the timeline of ``step``: each process's passes, and its updates behind them.

    At the end is what the first stage and the last take for parameters that they share.
    """
    spans: list[Span] = []
    ends_s = list(played(step.partition, work.pipeline, _links_s(work, step.partition), spans).ends_s)
    for device, update_s in enumerate(_updates_s(work, step.partition)):
        if update_s:
            spans.append(Span(lane_of(device), "updates", ends_s[device], ends_s[device] + update_s))
    if work.shared_s:
        begin_s = step.step_s - work.shared_s
        for device in sorted({work.pipeline.device_of(stage) for stage in (0, work.pipeline.stages - 1)}):
            spans.append(Span(lane_of(device), "shared parameters", begin_s, step.step_s))
    return sorted(spans, key=lambda span: (span.begin_s, span.end_s))


def _links_s(work: StagedWork, found: Partition) -> list[float]:
    return [work.link_s[stage.first] for stage in found.stages[1:]]


def _updates_s(work: StagedWork, found: Partition) -> list[float]:
    """Returns what each process updates behind its last pass."""
    own = (map(found.stages.__getitem__, work.pipeline.stages_of(n)) for n in range(work.pipeline.devices))
    return [sum(sum(work.update_s[one.first : one.first + one.layers]) for one in stages) for stages in own]


def staged_bound_s(work: StagedWork) -> float:
    """Returns seconds below which no cut's step is, from sums over all layers.

    A pass through all stages takes what they compute, and no less than what they fetch beyond their windows or bring
    down. A device computes for all its micro-batches. Where each has one stage, the first micro-batch comes to stage s
    behind the forward passes of those before and the links between, and its last gradient leaves before theirs: a step
    takes m · t + T + L, t being the stage's time, T that of those before it, and L twice what links take up to there,
    no less than of the s smallest inputs. With a = 1 - 1/m no cut of a row of time C makes that less in all stages than
    (C + Σ L · a^(stages - 1 - s) / m) / (1 - a^stages).
    """
    pipeline, count = work.pipeline, work.pipeline.micro_batches
    forward_s = sum(layer.forward_s for layer in work.layers)
    backward_s = sum(layer.backward_s for layer in work.layers) + (forward_s if work.is_kept is False else 0.0)
    updates_s = sum(work.update_s)
    if work.offloaded is not None:
        fetches_s, gradients_s, updates_s = work.offloaded.least_s(pipeline.stages)
        forward_s, backward_s = max(forward_s, fetches_s), max(backward_s, fetches_s, gradients_s)
    row_s = forward_s + backward_s
    least_s = count * row_s / pipeline.devices
    if work.offloaded is None:
        least_s += updates_s / pipeline.devices
    else:
        least_s = max(least_s, updates_s / pipeline.devices)
    if pipeline.stages_per_device == 1:
        again, links_s = 1 - 1 / count, accumulate(sorted(work.link_s[1:])[: pipeline.stages - 1], initial=0.0)
        sent_s = 2 * sum(one * again ** (pipeline.stages - 1 - stage) for stage, one in enumerate(links_s)) / count
        least_s = max(least_s, (row_s + sent_s) / (1 - again**pipeline.stages))
    return least_s + work.shared_s


def needed_bytes(work: StagedWork) -> int:
    """Returns what the fullest stage takes if all have as many layers: with so much each, a partition fits."""
    stages = work.pipeline.stages
    cuts = np.cumsum([0, *equal_sizes(len(work.layers), stages)])
    return int(work.costs.runs(np.arange(stages), cuts[:-1], cuts[1:]).least_bytes().max())


def fits(work: StagedWork) -> bool:
    """Whether a partition fits: as many layers in each stage, or as many as go, from the first stage on, or any.

    Of more stages and layers than ``LOOKED_AT`` only the first two are looked at, and a row may be refused that fits.
    To fill stages from the first one on does not find a partition where a layer is too large for the stage behind, but
    not for a later one, which holds fewer micro-batches, nor where a stage takes less with another layer, for the input
    of the layer that follows is smaller.
    """
    if needed_bytes(work) <= work.memory_bytes:
        return True
    stages, layers = work.pipeline.stages, len(work.layers)
    limits = [work.memory_bytes] * stages
    if furthest(work.costs, limits):
        return True
    if work.offloaded is None and sum(layer.weight_bytes for layer in work.layers) > sum(limits):
        return False
    return stages * layers**2 <= LOOKED_AT and cut(work.costs, limits, missing_bytes)[0] <= 0
