"""Loss over steps and memory over time, a chart for each machine's runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import accumulate

from stronghold.lab.page.charts import COLOURS, Curve, draw_chart, steps_to_a_point
from stronghold.lab.page.reading import RecordedRun
from stronghold.lab.page.runs import by_machine
from stronghold.lab.page.section import Section, legend
from stronghold.lab.records.runs import to_float

_POINTS = 8_000
"""Of all curves of one kind together, which keeps the page small."""
_MOST_POINTS, _FEWEST_POINTS = 400, 50
_MIB, _GIB = 1024**2, 1024**3


def loss_section(runs: Sequence[RecordedRun]) -> tuple[Section, list[str]]:
    """Returns the loss of every run that has a log, and notes on what could not be drawn."""
    parts: list[str] = []
    notes: list[str] = []
    logged, points = _logged(runs)
    for heading, group in _groups(logged):
        curves = []
        for colour, run in group:
            loss = _values(run, "loss", notes)
            if broken := sum(not math.isfinite(value) for value in loss or []):
                notes.append(f"{run.name}: the loss of {broken} of {len(run.steps)} steps is no finite number")
            if loss is not None and (steps := _values(run, "step", notes)):
                label = f"{run.name}{' (WRONG)' * bool(run.wrong)}"
                curves.append(Curve(label=label, colour=colour, x=[int(step) for step in steps], y=loss))
        chart = draw_chart(curves, title="Training loss", x_label="step", y_label="nats per token", most_points=points)
        parts.append(_charts(heading, [chart], curves))
    about = "<p>Of runs with the same losses one lies on another, dashed.</p>"
    return Section(title="Loss", body=about + _thinning(logged, points) + ("".join(parts) or _NOTHING)), notes


def memory_section(runs: Sequence[RecordedRun]) -> tuple[Section, list[str]]:
    """Returns host and device memory of every run that has a log, over the time that its steps took, and notes."""
    parts: list[str] = []
    notes: list[str] = []
    logged, points = _logged(runs)
    for heading, group in _groups(logged):
        host: list[Curve] = []
        device: list[Curve] = []
        for colour, run in group:
            times = _values(run, "iteration_s", notes)
            if times is None:
                continue
            elapsed = list(accumulate(times))
            for name, curves in (("peak_host_bytes", host), ("device_bytes", device)):
                value = _values(run, name, notes)
                if name == "device_bytes" and value is not None:
                    peaks = [to_float(step.get("peak_device_bytes") or 0) for step in run.steps]
                    value = [peak or held for peak, held in zip(peaks, value, strict=True)]
                    if not any(value):  # it does not tell the device's memory from the host's
                        continue
                if value is not None:
                    curves.append(Curve(label=run.name, colour=colour, x=elapsed, y=value))
        charts = [
            _memory_chart(title, curves, points)
            for title, curves in (("Host: the process's peak so far", host), ("Device", device))
        ]
        parts.append(_charts(heading, charts, host if len(host) > len(device) else device))
    about = (
        "<p>On the device: the peak where the device counts it, else, as on the CPU, what is held there between steps; "
        "of runs that do not tell it from the host's there is no curve.</p>"
    )
    return Section(title="Memory", body=about + _thinning(logged, points) + ("".join(parts) or _NOTHING)), notes


def _memory_chart(title: str, curves: Sequence[Curve], points: int) -> str:
    """Returns ``curves`` of bytes over seconds as a chart in units that fit them."""
    seconds = max((curve.x[-1] for curve in curves), default=0.0)
    highest = max((value for curve in curves for value in curve.y), default=0.0)
    time_unit, time = ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 5 * 3600 else ("h", 3600.0)
    size_unit, size = ("GiB", _GIB) if highest >= _GIB else ("MiB", _MIB)
    scaled = [
        replace(curve, x=[value / time for value in curve.x], y=[value / size for value in curve.y]) for curve in curves
    ]
    labels = {"x_label": f"time in steps ({time_unit})", "y_label": size_unit}
    return draw_chart(scaled, title=title, most_points=points, from_zero=True, **labels)


_NOTHING = "<p>No run here has a log of its steps.</p>"


def _logged(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], int]:
    """Returns the runs that have steps, and how many points each may have."""
    logged = [run for run in runs if run.steps]
    return logged, min(_MOST_POINTS, max(_FEWEST_POINTS, _POINTS // max(1, len(logged))))


def _groups(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, list[tuple[str, RecordedRun]]]]:
    """Yields runs that one chart shows, each with its colour, and a heading: of one machine, and as many as colours."""
    for hardware, own in by_machine(runs):
        for begin in range(0, len(own), len(COLOURS)):
            part = own[begin : begin + len(COLOURS)]
            which = f", runs {begin + 1} to {begin + len(part)} of {len(own)}" if len(own) > len(COLOURS) else ""
            yield hardware + which, list(zip(COLOURS, part, strict=False))


def _values(run: RecordedRun, name: str, notes: list[str]) -> list[float] | None:
    """Returns what each step has by a name; None, with a note, where a step lacks it."""
    try:
        return [to_float(step[name]) for step in run.steps]
    except (KeyError, TypeError, ValueError):
        notes.append(f"no curve of {name} of {run.name}: a step of its log has none, a log of another or an older form")
        return None


def _charts(heading: str, charts: Sequence[str], curves: Sequence[Curve]) -> str:
    drawn = "".join(f"<div>{chart}</div>" for chart in charts if chart)
    if not drawn:
        return ""
    names = legend((curve.colour, curve.label) for curve in curves)
    return f'<h3>{escape(heading)}</h3><div class="charts">{drawn}</div>{names}'


def _thinning(runs: Sequence[RecordedRun], points: int) -> str:
    longest = max((len(run.steps) for run in runs), default=0)
    if longest <= points:
        return ""
    return (
        f"<p>Runs of more than {points} steps: each point is the mean of neighbouring steps, up to "
        f"{steps_to_a_point(longest, points)} of them, and the band goes from their lowest to their highest.</p>"
    )
