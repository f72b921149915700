"""Figures drawn from runs' logs alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stronghold.lab.outputs import PICTURES, write_figure
from stronghold.lab.records.runs import WARM_UP_STEPS, Run, to_float, tokens_of

# Okabe and Ito's palette: told apart by people of every colour vision; further runs change the dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_HEIGHT_INCHES = 4.4
_COLUMNS, _ROWS, _ROW_INCHES = 3, 3, 0.21
"""Of the legend: the most columns, as many rows as the height has room for, and what one more adds to it."""
_SMOOTHED_FROM = 30
"""Steps from which a running mean is drawn over the faint single losses."""


def draw_runs(runs: Sequence[Run], path: str | Path) -> Path:
    """Draws loss and throughput of ``runs`` over their steps into one picture at ``path``, of the kind that it ends in.

    That is PNG, SVG or PDF, and PNG for all else.

    Raises ValueError if there is no run, or one without a step, and OSError where the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if not runs or (empty := [run.name for run in runs if not run.steps]):
        got = f"none in {', '.join(map(repr, empty))}" if runs else "no run"
        raise ValueError(f"there must be at least one step to draw in each run (got {got}); pass other runs")
    path = Path(path)
    style: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    style["text.parse_math"] = False  # the $ in a run's name is one
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11.0, _HEIGHT_INCHES), dpi=150, layout="constrained")
        loss, speed = figure.subplots(1, 2)
        lines, drawn, looks = [], list[list[float]](), list[tuple[str, str]]()
        for index, run in enumerate(runs):
            losses, colour = _losses(run), _COLOURS[index % len(_COLOURS)]
            first = index // len(_COLOURS) + drawn.count(losses)  # of equal losses one lies on another, dashed
            dashes = [_DASHES[(first + more) % len(_DASHES)] for more in range(len(_DASHES))]
            dash = next((dash for dash in dashes if (colour, dash) not in looks), dashes[0])
            drawn.append(losses)
            looks.append((colour, dash))
            look: dict[str, Any] = {"color": colour, "linestyle": dash}
            lines.append(_draw_loss(loss, run, look))
            _draw_speed(speed, run, look)
        loss.set(title="Training loss", xlabel="step", ylabel="loss (nats per token)")
        speed.set(title="Throughput", xlabel="step", ylabel="tokens per second")
        speed.set_ylim(bottom=0)
        speed.yaxis.set_major_formatter("{x:,.0f}")
        for axes in (loss, speed):
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.margins(x=0.02)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if len({step["step"] for run in runs for step in run.steps}) == 1:  # else parts of a step are marked
                axes.set_xlim(runs[0].steps[0]["step"] - 1, runs[0].steps[0]["step"] + 1)
        _add_legend(figure, lines, _labels(runs))
        write_figure(figure, path, kind[1:] if (kind := path.suffix.lower()) in PICTURES else "png")
    return path


def check_drawable(run: Run) -> list[str]:
    """Returns notes on what a picture does not show of a run.

    Raises ValueError for one without a step, or with a log of another form.
    """
    if not run.steps:
        raise ValueError(
            f"there must be at least one step to draw in each run (got none in {run.name!r}); pass another"
        )
    for step in run.steps:
        try:
            is_one = type(step["step"]) is int and step["iteration_s"] > 0
            to_float(step["loss"]), tokens_of(run.start, step) / step["iteration_s"]
        except (ArithmeticError, KeyError, TypeError, ValueError):
            is_one = False
        if not is_one:
            told = {name: step.get(name) for name in ("step", "loss", "iteration_s")}
            raise ValueError(
                f"its log must tell batch and sequence, and of each step its number, loss and seconds (got {told}); "
                "pass the log of `stronghold train`"
            )
    broken = sum(not math.isfinite(loss) for loss in _losses(run))
    return [f"{run.name}: the loss of {broken} of {len(run.steps)} steps is no finite number"] if broken else []


def _losses(run: Run) -> list[float]:
    return [to_float(step["loss"]) for step in run.steps]


def _add_legend(figure: Any, lines: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds the names below the curves, in as many columns as fit the width; many rows take nothing from the curves."""
    for columns in range(min(len(labels), _COLUMNS), 0, -1):
        # Not by the lines' own labels: Matplotlib leaves out those that begin with _.
        legend = figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False)
        beyond = legend.get_window_extent().width - figure.bbox.width
        if beyond <= 0:
            break
        if columns > 1:
            legend.remove()
        else:
            longest = max(text.get_window_extent().width for text in legend.get_texts())
            for text in legend.get_texts():
                text.set_fontsize(text.get_fontsize() * 0.95 * (longest - beyond) / longest)
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(_HEIGHT_INCHES + _ROW_INCHES * max(0, rows - _ROWS))


def _draw_loss(axes: Any, run: Run, style: dict[str, Any]) -> Any:
    """Draws a run's losses, and returns the line of its legend."""
    steps, losses = [step["step"] for step in run.steps], _losses(run)
    if len(steps) < _SMOOTHED_FROM:
        return axes.plot(steps, losses, linewidth=1.6, marker="o" if len(steps) < 3 else None, **style)[0]
    axes.plot(steps, losses, linewidth=0.7, alpha=0.3, **style)
    return axes.plot(steps, _running_mean(losses, max(3, len(losses) // 20)), linewidth=1.6, **style)[0]


def _draw_speed(axes: Any, run: Run, style: dict[str, Any]) -> None:
    timed = run.steps[WARM_UP_STEPS:] if len(run.steps) > 2 * WARM_UP_STEPS else run.steps
    steps = [step["step"] for step in timed]
    rates = [tokens_of(run.start, step) / step["iteration_s"] for step in timed]
    marker = "o" if len(steps) < 3 else None
    axes.plot(steps, rates, linewidth=1.1, marker=marker, **style)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Returns the mean of up to ``width`` values around each place, as many before it as after it."""
    reach = [min(width // 2, place, len(values) - 1 - place) for place in range(len(values))]
    return [sum(values[place - side : place + side + 1]) / (2 * side + 1) for place, side in enumerate(reach)]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Returns the runs' names, numbered where two are the same, with ? for what is not UTF-8 in a folder's name."""
    names = [run.name.encode("utf-8", "replace").decode() for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]
