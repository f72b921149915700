"""Charts: the lines are where the numbers are, and what is left away can be seen."""

import math
import re
from xml.etree import ElementTree

import pytest

from stronghold.lab.page.charts import Curve, draw_chart, ticks


def curve(y, x=None, label="run"):
    return Curve(label=label, colour="#0072B2", x=list(range(1, len(y) + 1)) if x is None else x, y=y)


def draw(*curves, most_points=400, **options):
    labels = {"title": "Loss", "x_label": "step", "y_label": "nats"}
    return ElementTree.fromstring(draw_chart(curves, most_points=most_points, **labels, **options))


def places(chart, tag="polyline"):
    return [[tuple(map(float, place.split(","))) for place in line.get("points").split()] for line in chart.iter(tag)]


def at_tick(chart, text):
    """Returns where on the axis of values a number is written; the letters' own height is 8, half of it below."""
    return next(float(t.get("y")) - 4 for t in chart.iter("text") if t.text == text and t.get("text-anchor") == "end")


@pytest.mark.parametrize(
    ("low", "high", "least", "expected"),
    [
        (1, 50, 0, [0, 10, 20, 30, 40, 50]),
        (3.2, 10.9, 0, [2, 4, 6, 8, 10, 12]),
        (0.001, 0.0023, 0, [0.001, 0.0015, 0.002, 0.0025]),
        (-1, 1, 0, [-1, -0.5, 0, 0.5, 1]),
        (0, 0, 0, [0, 0.2]),
        (1, 3, 1, [1, 2, 3]),
    ],
)
def test_ticks_are_round_and_around_the_values(low, high, least, expected):
    assert ticks(low, high, least=least) == pytest.approx(expected)


def test_a_line_goes_through_its_values():
    chart = draw(curve([2.0, 4.0, 3.0]))
    ((first, second, third),) = places(chart)
    assert first[1] == pytest.approx(at_tick(chart, "2.0"), abs=0.11)
    assert second[1] == pytest.approx(at_tick(chart, "4.0"), abs=0.11)
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.11)
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.11)
    assert not list(chart.iter("polygon"))


def test_what_is_no_number_breaks_the_line_and_a_value_alone_is_a_dot():
    chart = draw(curve([1.0, 2.0, math.nan, 3.0, math.inf, 1.0, 2.0]))
    assert [len(part) for part in places(chart)] == [2, 2]
    assert len(list(chart.iter("circle"))) == 1
    assert draw_chart([curve([math.nan])], title="", x_label="", y_label="", most_points=9) == ""
    assert draw_chart([], title="", x_label="", y_label="", most_points=9) == ""


def test_a_long_run_is_thinned_to_means_with_a_band_from_the_lowest_to_the_highest():
    chart = draw(curve([1.0, 3.0] * 50), most_points=10)
    (line,) = places(chart)
    assert len(line) == 10
    assert {y for _, y in line} == {line[0][1]}
    assert line[0][1] == pytest.approx(at_tick(chart, "2.0"), abs=0.11)
    (band,) = places(chart, "polygon")
    assert [y for _, y in band] == [pytest.approx(at_tick(chart, "3.0"), abs=0.11)] * 10 + [
        pytest.approx(at_tick(chart, "1.0"), abs=0.11)
    ] * 10


def test_axes_begin_at_0_where_they_should():
    chart = draw(curve([5.0, 6.0], x=[10.0, 20.0]), from_zero=True)
    assert at_tick(chart, "0") > at_tick(chart, "6")
    ((first, second),) = places(chart)
    assert second[0] - first[0] == pytest.approx(first[0] - 58, abs=0.11)


def test_steps_are_whole_numbers():
    texts = [text.text for text in draw(curve([1.0, 2.0, 3.0])).iter("text") if text.get("text-anchor") == "middle"]
    assert "2" in texts and not any(re.fullmatch(r"\d\.\d", text) for text in texts)


def test_labels_are_escaped():
    label = '<script>alert("1")</script>'
    assert label in [title.text for title in draw(curve([1.0, 2.0], label=label)).iter("title")]
