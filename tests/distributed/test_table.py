"""A partition as a table: whole, however narrow the terminal."""

import io

import pytest
from rich.console import Console

from stronghold.distributed.table import partition_table
from stronghold.planner.partition import Partition, StagePlan
from stronghold.planner.pipeline_order import Pipeline


def stage(first, computing_s, longest="computing"):
    return StagePlan(
        first=first,
        layers=12,
        recomputed=3,
        forward_s=computing_s,
        backward_s=2 * computing_s,
        memory_bytes=77 * 2**20,
        computing_s=2 * computing_s,
        spread_s=computing_s,
        longest=longest,
    )


@pytest.mark.parametrize("width", [80, 60, 30])
@pytest.mark.parametrize("longest", ["computing", "gradients"])
def test_nothing_is_cut_off(width, longest):
    stages = (stage(0, 0.5), stage(12, 0.0123), stage(24, 0.25, longest), stage(36, 0.25))
    found = Partition(stages=stages, ideal_s=1.0, spread=0.5)
    pipeline = Pipeline(schedule="Interleaved1F1B", devices=2, micro_batches=8, stages_per_device=2)
    text = io.StringIO()
    Console(file=text, width=width).print(partition_table(found, pipeline))
    shown = text.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    if (width, longest) == (80, "computing"):
        assert "1 1 12 12 - 23 3 36.9 50.0 % 77.0 MiB 97.5 %" in " ".join(shown.split())
