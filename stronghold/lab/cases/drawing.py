"""A case's figure: what was measured in one panel, what the artifact measured in another, with its own scale."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stronghold.lab.cases.case import Case
from stronghold.lab.cases.points import Panel, Point, Shown, in_words
from stronghold.lab.cases.published import CAVEAT
from stronghold.lab.cases.series import SERIES
from stronghold.lab.cases.table import format_value
from stronghold.lab.outputs import write_figure
from stronghold.units import format_bytes, format_count

WRONG_COLOUR = "#C00000"
MOST_NOTES = 7
_CAPTION_WIDTH = 102
"""Characters for each panel's width."""
_BEHIND = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
"""What keeps a number readable where a line passes."""
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text, to be searched and copied
    "svg.hashsalt": "stronghold",
}


def save_figure(shown: Shown, stem: Path) -> list[Path]:
    """Draws a case into ``stem``.png and .svg. Raises OSError, with its name, where one cannot be written."""
    import matplotlib

    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    with matplotlib.rc_context(_STYLE):
        figure = draw(shown)
        for path in paths:
            kind = path.suffix[1:]
            write_figure(figure, path, kind, metadata={"Date": None} if kind == "svg" else None)
    return paths


def draw(shown: Shown) -> Any:
    """Returns the matplotlib figure of a case."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = shown.panels
    widths = [max(3, _bars(panel)) for panel in panels] if not shown.case.varies else [1] * len(panels)
    caption = _caption(shown)
    height = 4.2 + 0.17 * caption.count("\n")
    figure = Figure(figsize=(5.6 * len(panels) + 1, height), dpi=150, layout="constrained")
    rows = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)
    for axes, panel in zip(rows[0], panels, strict=True):
        (_draw_line if shown.case.varies else _draw_bars)(axes, shown.case, panel)
        _finish(axes, shown, panel)
    figure.suptitle(f"{shown.case.title} ({shown.case.figure})", x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color="#444444")
    if shown.case.x == "baseline":
        ours = SERIES["stronghold"]
        patch = Patch(color=ours.colour, label=f"{ours.label} on the same model")
        rows[0][-1].legend(handles=[patch], loc="upper right", frameon=False, fontsize=8)
    return figure


def _draw_bars(axes: Any, case: Case, panel: Panel) -> None:
    """Draws a bar for each point, those of one group side by side."""
    places, labels = _places(panel.points)
    for point, place in zip(panel.points, places, strict=True):
        series = SERIES[point.wanted.method]
        axes.bar(
            place,
            point.y,
            0.8 if not point.wanted.group else 0.4,
            yerr=None if point.low == point.high else [[point.y - point.low], [point.high - point.y]],
            error_kw={"elinewidth": 0.9, "capsize": 3, "ecolor": "#333333"},
            color=series.colour,
            edgecolor=WRONG_COLOUR if point.wrong else "white",
            linewidth=2.0 if point.wrong else 0.8,
            hatch="///" if panel.published else None,
            label=series.label,
        )
        text = format_value(case, point.y) + ("\nwrong loss" if point.wrong else "")
        colour = WRONG_COLOUR if point.wrong else "#222222"
        at = (place, max(point.y, point.high))
        axes.annotate(text, at, (0, 3), textcoords="offset points", ha="center", fontsize=8, color=colour)
    axes.set_xticks(*labels, fontsize=8)
    axes.set_xlim(-0.6, max(labels[0], default=0) + 0.6)


def _draw_line(axes: Any, case: Case, panel: Panel) -> None:
    """Draws one line over the case's setting, the spread of each point as a bar, and marks those that are wrong."""
    points = panel.points
    x = [getattr(point.wanted, case.x) for point in points]
    y = [point.y for point in points]
    spread = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
    series = SERIES[points[0].wanted.method]
    style = {"linestyle": "--", "markerfacecolor": "white"} if panel.published else {"linestyle": "-"}
    line = {"color": series.colour, "marker": series.marker, "linewidth": 1.6, "label": series.label}
    if case.x == "layers" and x[0]:  # what the case is to show: time grows with the layers, and no faster
        ends = [0, x[-1]]
        axes.plot(ends, [y[0] / x[0] * end for end in ends], ":", color="#777777", linewidth=1.2, zorder=1)
        axes.annotate(
            f"dotted: {x[0]} layers' time, in proportion",
            (0.97, 0.04),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
        )
    axes.errorbar(x, y, yerr=spread, capsize=3, elinewidth=0.9, **line, **style)
    wrong = [point for point in points if point.wrong]
    if wrong:
        at = [getattr(point.wanted, case.x) for point in wrong], [point.y for point in wrong]
        axes.plot(*at, "x", color=WRONG_COLOUR, markersize=11, markeredgewidth=2, zorder=4)
    labelled = _apart(x)
    for point, place in zip(points, x, strict=True):
        if place not in labelled and not point.wrong:
            continue
        text, over = format_value(case, point.y), (place, max(point.y, point.high))
        words = {"text": text + "\nwrong loss", "color": WRONG_COLOUR} if point.wrong else {"text": text}
        axes.annotate(
            **words, xy=over, xytext=(0, 7), bbox=_BEHIND, textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(labelled)
    axes.margins(x=0.06)


def _apart(places: Sequence[float]) -> list[float]:
    """Returns those of ascending ``places`` that have room for a number beside the one before."""
    least = (places[-1] - places[0]) / 18
    kept = [*places[:1]]
    for place in places[1:]:
        if place - kept[-1] >= least:
            kept.append(place)
    return kept


def _finish(axes: Any, shown: Shown, panel: Panel) -> None:
    case = shown.case
    kind = "Published" if panel.published else f"Measured (--machine {shown.preset.name})"
    axes.set_title(f"{kind}\n{textwrap.fill(panel.machine, 70)}", fontsize=9)
    axes.set(xlabel=case.x_label, ylabel=case.y_label)
    axes.set_ylim(0, 1.2 * max((max(point.y, point.high) for point in panel.points), default=0) or 1)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(lambda value, _: format_count(round(value)) if case.largest else f"{value:g}")


def _places(points: Sequence[Point]) -> tuple[list[float], tuple[list[float], list[str]]]:
    """Returns where each bar stands, and the ticks below: their places and labels."""
    if points and points[0].wanted.group:
        groups = list(dict.fromkeys(point.wanted.group for point in points))
        places = [groups.index(p.wanted.group) + (0.2 if p.wanted.method == "stronghold" else -0.2) for p in points]
        layers = {point.wanted.group: point.wanted.layers for point in points}
        labels = [f"{_broken(SERIES[group].label)}\n{layers[group]} layers" for group in groups]
        return places, (list(map(float, range(len(groups)))), labels)
    places = list(map(float, range(len(points))))
    labels = [_broken(SERIES[p.wanted.method].label) + f"\n{_layers(p.wanted.layers)}" for p in points]
    return places, (places, labels)


def _bars(panel: Panel) -> int:
    return len({point.wanted.group or point.wanted.method for point in panel.points})


def _broken(label: str) -> str:
    return label.replace("-", "-\n", 1).replace(" ", "\n", 1) if len(label) > 11 else label


def _layers(layers: int) -> str:
    return f"{layers} layers" if layers else "no layer"


def _caption(shown: Shown) -> str:
    """Returns what must be known to read the figure: settings, commits, what is wrong, what is missing."""
    lines = []
    if shown.here:
        shape = shown.preset
        commits = {point.measurement.commit for point in shown.here.points if point.measurement}
        lines.append(
            f"Measured: {shape.dtype}, hidden {shape.hidden}, {shape.heads} heads, vocabulary {shape.vocabulary}, "
            f"{shape.batch} samples of {shape.sequence} tokens per step{_how(shown)}; "
            f"commit {', '.join(sorted(_short(commit) for commit in commits))}."
        )
    lines.append("Published: fp32, hidden 2048, 16 heads, 4 samples of 1024 tokens per step. " + CAVEAT)
    for panel in shown.panels:
        lines += [
            f"Wrong: {in_words(point.wanted)}, {point.wrong} ({point.measurement.source})."
            for point in panel.points
            if point.measurement and point.wrong
        ]
    notes = list(shown.notes[:MOST_NOTES])
    if len(shown.notes) > MOST_NOTES:
        notes.append(f"and {len(shown.notes) - MOST_NOTES} more, which extract tells")
    lines += [f"Notes: {'; '.join(notes)}."] if notes else []
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _CAPTION_WIDTH * len(shown.panels)))


def _how(shown: Shown) -> str:
    case, preset = shown.case, shown.preset
    if case.largest:
        limits = f"{format_bytes(preset.device_limit)} of device and {format_bytes(preset.host_limit)} of host memory"
        return f", at most {limits}, three steps a trial, bisection over the number of layers"
    window = f", window {preset.window} for STRONGHOLD" if case.x != "window" else ""
    layers = f", {shown.here.points[0].wanted.layers} layers" if case.x == "window" and shown.here else ""
    return f"{window}{layers}, median of the steps after the second, bars from the 10th to the 90th percentile"


def _short(commit: str) -> str:
    """Returns a commit as people write it, "-dirty" kept."""
    name, dirty, _ = commit.partition("-dirty")
    return (name[:10] + dirty) or "not recorded"
