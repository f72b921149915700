"""A plan beside the run that followed it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stronghold.lab.records.runs import Summary
from stronghold.planned import PARTS, PlannedStep


def receipt_rows(
    planned: PlannedStep, summary: Summary, steps: Sequence[Mapping[str, Any]], *, counts_device: bool = True
) -> list[tuple[str, str, str]]:
    """Returns the lines of a table: what was planned beside what a run has measured, by resource.

    Its times are medians: of the summary, and of ``steps``, the run's, of which the first is left out. Where the step
    was off, the last line says which numbers of the machine are to be measured again. Of several processes, whose
    device does not count here, the devices' peaks are in the table of stages.
    """
    peaks = {"device": summary.peak_device_bytes if counts_device else 0, "host": summary.peak_host_bytes}
    return planned.rows(
        summary.iteration_s,
        {part: statistics.median([step[part] or 0.0 for step in steps[1:]] or [0.0]) for part, _ in PARTS.values()},
        {name: peak for name, peak in peaks.items() if peak},
        spread_s=(summary.iteration_s_p10, summary.iteration_s_p90),
    )
