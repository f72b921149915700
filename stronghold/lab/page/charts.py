"""Lines over steps or time as SVG, in the page's own colours."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Okabe and Ito's palette, told apart by people of every colour vision; black, which is not seen on black, left out."""
_DASHES = ("none", "8 5", "3 4", "12 4 3 4", "1 4", "14 8", "6 3 1 3")
"""So that a curve shows that lies under another."""
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 34, 42


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values ``y`` over ``x``, which rises. NaN and infinities break the line."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class _Point:
    x: float
    low: float
    mean: float
    high: float


def draw_chart(
    curves: Sequence[Curve], *, title: str, x_label: str, y_label: str, most_points: int, from_zero: bool = False
) -> str:
    """Returns an SVG of ``curves``, "" where no value is finite.

    Of a curve with more than ``most_points`` values, as many neighbours as it takes become one point: the line is their
    mean, a band around it goes from the lowest to the highest. Both axes begin at 0 with ``from_zero``, else with the
    data.
    """
    drawn = [(curve, _thinned(curve, most_points)) for curve in curves]
    points = [point for _, own in drawn for point in own if _is_finite(point)]
    if not points:
        return ""
    left, right = 0.0 if from_zero else min(point.x for point in points), max(point.x for point in points)
    counted = all(isinstance(x, int) for curve in curves for x in curve.x)
    x_ticks = ticks(left, right, least=1.0 if counted else 0.0)
    y_ticks = ticks(0.0 if from_zero else min(point.low for point in points), max(point.high for point in points))
    frame = _Frame(x=(left, right if right > left else left + 1), y=(y_ticks[0], y_ticks[-1]))
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="0" y="14">{escape(title)}</text>',
        *(_y_tick(frame, value, y_ticks) for value in y_ticks),
        *(_x_tick(frame, value, x_ticks) for value in x_ticks if frame.x[0] <= value <= frame.x[1]),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(12 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    for number, (curve, own) in enumerate(drawn):
        ink = f'stroke="{curve.colour}" fill="{curve.colour}" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        parts.append(f"<g {ink}><title>{escape(curve.label)}</title>")
        for finite, part in groupby(own, _is_finite):
            if finite:
                parts += _draw_part(frame, list(part))
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def steps_to_a_point(values: int, most_points: int) -> int:
    """Returns how many neighbours become one point."""
    return max(1, math.ceil(values / most_points))


def ticks(low: float, high: float, *, least: float = 0.0) -> list[float]:
    """Returns some five round numbers, ``least`` apart or more, that begin and end around ``low`` to ``high``."""
    span = (high - low) or abs(high) or 1.0
    rough = max(span / 5, least)
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [number * apart for number in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        return _LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (_WIDTH - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (_HEIGHT - _TOP - _BOTTOM)


def _thinned(curve: Curve, most_points: int) -> list[_Point]:
    width = steps_to_a_point(len(curve.x), most_points)
    return list(_points(curve, width))


def _points(curve: Curve, width: int) -> Iterator[_Point]:
    for begin in range(0, len(curve.x), width):
        own = curve.y[begin : begin + width]
        middle = sum(curve.x[begin : begin + width]) / len(own)
        yield _Point(x=middle, low=min(own), mean=sum(own) / len(own), high=max(own))


def _is_finite(point: _Point) -> bool:
    return math.isfinite(point.x + point.mean)


def _draw_part(frame: _Frame, part: list[_Point]) -> Iterator[str]:
    """Yields a line through neighbours, and the band around it where there is one."""
    if any(point.low < point.high for point in part):
        ring = [(point.x, point.high) for point in part] + [(point.x, point.low) for point in reversed(part)]
        yield f'<polygon class="band" points="{_places(frame, ring)}"/>'
    if len(part) == 1:
        yield f'<circle cx="{frame.across(part[0].x):.1f}" cy="{frame.down(part[0].mean):.1f}" r="2.5"/>'
    else:
        yield f'<polyline points="{_places(frame, [(point.x, point.mean) for point in part])}"/>'


def _places(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{frame.across(x):.1f},{frame.down(y):.1f}" for x, y in points)


def _x_tick(frame: _Frame, value: float, all_ticks: Sequence[float]) -> str:
    place = frame.across(value)
    anchor = "end" if place > _WIDTH - 2 * _RIGHT else "middle"
    below = _HEIGHT - _BOTTOM + 16
    return f'<text class="tick" x="{place:.1f}" y="{below}" text-anchor="{anchor}">{_number(value, all_ticks)}</text>'


def _y_tick(frame: _Frame, value: float, all_ticks: Sequence[float]) -> str:
    place = frame.down(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{_number(value, all_ticks)}</text>'
    )


def _number(value: float, all_ticks: Sequence[float]) -> str:
    """Returns a tick's number with as many decimals as tell it from its neighbours."""
    decimals = max(0, -math.floor(math.log10(all_ticks[1] - all_ticks[0]) + 1e-9))
    return f"{value:,.{decimals}f}"
