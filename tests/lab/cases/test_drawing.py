"""Figures: what is drawn is what was recorded, panel by panel, and it says what it is of."""

from itertools import pairwise

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from stronghold.lab.cases.case import CASES
from stronghold.lab.cases.drawing import draw, save_figure
from stronghold.lab.cases.machines import TINY
from stronghold.lab.cases.points import show, table_of
from stronghold.lab.cases.series import SERIES
from tests.lab.cases.conftest import make_record, make_trial


def figure(number, records):
    return draw(show(CASES[number], TINY, records))


def bars(axes):
    return [round(patch.get_height(), 9) for patch in axes.patches]


def words(drawn):
    texts = [drawn.get_suptitle(), drawn.get_supxlabel(), *(axes.get_title(loc="left") for axes in drawn.axes)]
    texts += [text.get_text() for axes in drawn.axes for text in axes.texts]
    return "\n".join([*texts, *(axes.get_title() for axes in drawn.axes)])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_bars_are_as_high_as_the_records_say_and_the_published_are_hatched(number, measure):
    records = measure(
        make_trial(layers=2), make_trial("megatron-lm", 2), make_record("megatron-lm", seconds=0.25), make_record()
    )
    here, published = figure(number, records).axes
    assert bars(here) == ([2000, 2000] if number == 1 else [8.0, 4.0])
    assert bars(published) == [point.y for point in table_of(CASES[number]).points]
    assert [to_hex(patch.get_facecolor()) for patch in here.patches] == ["#666666", "#0072b2"]
    assert not any(patch.get_hatch() for patch in here.patches)
    assert all(patch.get_hatch() for patch in published.patches)


def test_the_bars_of_a_group_stand_side_by_side(measure):
    records = measure(make_record("megatron-lm", seconds=0.25), make_record())
    here, published = figure(2, records).axes
    assert [round(patch.get_x() + patch.get_width(), 6) for patch in here.patches] == [0, 0.4]
    root = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in published.patches)
    assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(root))
    assert [text.get_text() for text in here.get_xticklabels()] == ["Megatron-LM\n2 layers"]


def test_a_line_goes_through_the_records_with_their_spread(measure):
    records = measure(*(make_record(window=n, seconds=n / 8) for n in (4, 1, 2)))
    here, published = figure(5, records).axes
    line = here.containers[0]
    assert list(line[0].get_xdata()) == [1, 2, 4]
    assert list(line[0].get_ydata()) == [0.125, 0.25, 0.5]
    ends = [tuple(segment[:, 1]) for segment in line[2][0].get_segments()]
    assert ends == [pytest.approx((0.9 * n / 8, 1.2 * n / 8)) for n in (1, 2, 4)]
    assert list(published.containers[0][0].get_ydata()) == [point.y for point in table_of(CASES[5]).points]
    assert (here.get_ylim()[0], published.get_ylim()[0]) == (0, 0)
    assert here.get_ylabel() == "seconds per iteration"


@pytest.mark.parametrize("number", [3, 5])
def test_a_wrong_run_is_marked_and_listed(number, measure):
    records = measure(make_record("megatron-lm"), make_record(wrong="its loss differs in step 3"))
    said = words(figure(number, records))
    assert "wrong loss" in said
    assert "Wrong: stronghold, 2 layers, window 1, its loss differs in step 3 (record 2)." in said.replace("\n", " ")
    assert "wrong loss" not in words(figure(number, measure(make_record("megatron-lm"), make_record())))


def test_it_says_machine_commit_settings_and_what_is_missing(measure):
    said = words(figure(3, measure(make_record()))).replace("\n", " ")
    for expected in (
        "Throughput at Megatron-LM's largest model (figure 8a)",
        "Measured (--machine tiny) Some CPU, 2 cores, 8.00 GiB",
        "fp32, hidden 64, 2 heads, vocabulary 512, 2 samples of 32 tokens per step, window 1 for STRONGHOLD",
        "commit aaaaaaaaaa.",
        "V100 32 GB, 90 GB RAM, 12 cores",
        "Notes: megatron-lm, 2 layers: no run of it yet.",
    ):
        assert expected in said


@pytest.mark.parametrize("number", [pytest.param(n, marks=() if n in (1, 5) else pytest.mark.long) for n in CASES])
def test_it_is_saved_as_png_and_svg(number, tmp_path, measure):
    shown = show(CASES[number], TINY, measure(make_trial(), make_record(), make_record(window=2)))
    png, svg = save_figure(shown, tmp_path / "deep" / "case")
    assert (png.name, svg.name) == ("case.png", "case.svg")
    pixels = imread(png)
    assert pixels.shape[0] > 500
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4)[::97].tolist()}) > 5
    assert f">{CASES[number].title} (" in svg.read_text()


def test_without_a_measurement_the_published_stands_alone():
    assert len(figure(4, []).axes) == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the figure.*file/case.png"):
        save_figure(show(CASES[4], TINY, []), tmp_path / "file" / "case")


def test_every_method_has_a_colour_of_its_own():
    assert len({series.colour for series in SERIES.values()}) == len(SERIES)
