"""A partition to read: its stages as a table, and what they come to in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from stronghold.planner.offloaded_stages import RESOURCES
from stronghold.planner.partition import Partition, played
from stronghold.planner.pipeline_order import Pipeline
from stronghold.units import format_bytes, format_seconds


def partition_table(found: Partition, pipeline: Pipeline) -> Table:
    """Returns a line for each stage: layers, milliseconds of a micro-batch, peak bytes, and how far it is idle.

    ``spread`` is the part of a stage's computing by which measurements differ, from quartile to quartile, and there
    where layers were measured. ``longest`` is there where something holds a stage up beside its computing. ``idle`` is
    the share of its time for which it waits for the slowest while the pipeline is full. ``process`` is there where one
    has several stages.
    """
    table = Table(title="stages, and a micro-batch in each", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    several = pipeline.stages > pipeline.devices
    held_up = any(stage.longest != RESOURCES[0] for stage in found.stages)
    for name in (
        "stage",
        *(["process"] if several else []),
        "layers",
        "range",
        "recomputed",
        "ms",
        *(["spread"] if found.spread else []),
        *(["longest"] if held_up else []),
        "bytes",
        "idle",
    ):
        table.add_column(name, justify="right", overflow="fold")  # narrow, nothing is cut off
    for number, (stage, idle) in enumerate(zip(found.stages, found.idle_shares, strict=True)):
        table.add_row(
            str(number),
            *([str(pipeline.device_of(number))] if several else []),
            str(stage.layers),
            f"{stage.first} - {stage.first + stage.layers - 1}",
            str(stage.recomputed),
            f"{ms:,.1f}" if (ms := stage.time_s * 1000) >= 9.995 else f"{ms:.2f}",
            *([_percent(stage.spread_s / stage.computing_s if stage.computing_s else 0.0)] if found.spread else []),
            *([stage.longest] if held_up else []),
            format_bytes(stage.memory_bytes),
            _percent(idle),
        )
    return table


def partition_lines(found: Partition, pipeline: Pipeline, link_s: Sequence[float]) -> Iterator[str]:
    """Yields what the slowest stage and a whole step take, and how far that is from the ideal.

    ``link_s`` is what each boundary's activation takes to the next stage.
    """
    slowest = max(range(len(found.stages)), key=lambda number: found.stages[number].time_s)
    yield f"slowest    stage {slowest}: {format_seconds(found.slowest_s)} for a micro-batch"
    yield (
        f"ideal      {format_seconds(found.ideal_s)}, all layers' time divided evenly; the slowest stage takes "
        f"{_percent(found.over_ideal)} longer"
    )
    if found.spread:
        yield (
            f"spread     {_percent(found.spread)} of the layers' time, from quartile to quartile of what was measured; "
            "no cut is moved for less"
        )
    step = played(found, pipeline, link_s)
    links = f"up to {format_seconds(max(link_s))} to the next stage" if any(link_s) else "links that take no time"
    yield (
        f"step       {format_seconds(step.step_s)} for {pipeline.micro_batches} micro-batches under "
        f"{pipeline.schedule}; bubble {_percent(step.bubble)} (simulated, with {links})"
    )


def sizes_of(found: Partition) -> str:
    """Returns the layers of each stage as the command line takes them: ``26,23``."""
    return ",".join(str(stage.layers) for stage in found.stages)


def _percent(share: float) -> str:
    return f"{100 * max(0.0, share):.1f} %"  # rounding may leave less than nothing
