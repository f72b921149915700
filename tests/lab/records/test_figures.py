"""Figures: they show every run, and their running mean is one."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from stronghold.lab.records.figures import _labels, _running_mean, check_drawable, draw_runs
from stronghold.lab.records.runs import Run


def run(name, steps, loss=lambda step: 10 / step):
    return Run(
        name=name,
        start={"settings": {"batch": 2, "sequence": 50}},
        steps=tuple(
            {"step": step, "loss": loss(step), "iteration_s": 0.5 + step % 3 / 10} for step in range(1, steps + 1)
        ),
        end=None,
    )


def picture(path):
    from matplotlib.image import imread

    return imread(path)


def test_one_png_shows_the_colours_of_all_runs(tmp_path):
    path = draw_runs([run("one", 60), run("two", 10)], tmp_path / "deep" / "runs.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = np.rint(picture(path)[..., :3] * 255).astype(int)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(axis=-1).sum() > 100, colour
    assert (pixels == (0x00, 0x9E, 0x73)).all(axis=-1).sum() == 0


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.PDF", b"%PDF"), ("a.tmp", b"\x89PNG")])
def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path, name, begins):
    assert draw_runs([run("one", 5)], tmp_path / name).read_bytes().startswith(begins)


def test_every_name_is_in_the_legend_as_it_is(tmp_path):
    """A $ began a formula, a name with _ in front was left out, and one that is not UTF-8 was a TypeError."""
    import matplotlib

    names = ["_under", "a$\\frac$b", "<b>&", "r\udcfcn"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        drawn = draw_runs([run(name, 40) for name in names], tmp_path / "a.svg").read_text(encoding="utf-8")
    found = [element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert found[-4:] == [*names[:3], "r?n"]


def test_a_single_step_and_a_nan_are_drawn(tmp_path):
    draw_runs([run("one", 1)], tmp_path / "one.png")
    draw_runs([run("nan", 5, loss=lambda step: "nan" if step == 3 else 1.0)], tmp_path / "nan.png")
    assert picture(tmp_path / "one.png").shape == picture(tmp_path / "nan.png").shape


def axes_of(monkeypatch, runs, path):
    """Draws ``runs`` and returns the axes of loss and of speed."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **named: (figures.append(self), save(self, *args, **named))
    )
    draw_runs(runs, path)
    return figures[0].axes


def test_the_speed_is_by_the_tokens_that_a_step_tells(tmp_path, monkeypatch):
    """A fine-tuning's batches are filled up to their longest row: by --seq it was drawn several times as fast."""
    told = run("told", 3)
    told = replace(told, steps=tuple({**step, "tokens": 7.0, "iteration_s": 0.5} for step in told.steps))
    _, speed = axes_of(monkeypatch, [told], tmp_path / "a.png")
    assert list(speed.lines[0].get_ydata()) == [14.0] * 3


def test_of_equal_losses_one_lies_on_another_dashed(tmp_path, monkeypatch):
    loss, _ = axes_of(monkeypatch, [run(name, 5) for name in "abc"], tmp_path / "a.png")
    assert [line.get_linestyle() for line in loss.lines] == ["-", "--", ":"]


def test_many_runs_have_looks_of_their_own_and_room(tmp_path, monkeypatch):
    """The names of 40 runs took most of the picture, and what the axes are called was cut off."""
    runs = [
        run(f"run {number}", 5, loss=lambda step, n=number: 1.0 if n in (0, 6) else float(n)) for number in range(40)
    ]
    loss, _ = axes_of(monkeypatch, runs, tmp_path / "a.png")
    looks = {(line.get_color(), line.get_linestyle()) for line in loss.lines[:28]}
    assert len(looks) == 28, "as many as there are colours and dashes"
    figure = loss.figure
    assert loss.get_position().height * figure.get_figheight() > 2.5


@pytest.mark.parametrize("letters", [5, 60, 250])
def test_long_names_are_whole_in_the_legend(tmp_path, monkeypatch, letters):
    """Names such as a run's log has stood beyond both edges of the picture."""
    loss, _ = axes_of(monkeypatch, [run(f"{number}{'w' * letters}", 5) for number in range(4)], tmp_path / "a.png")
    (legend,) = loss.figure.legends
    names, figure = legend.get_texts(), loss.figure.bbox
    assert len(names) == 4
    for name in names:
        place = name.get_window_extent()
        assert figure.x0 <= place.x0 and place.x1 <= figure.x1 and figure.y0 <= place.y0 and place.y1 <= figure.y1
    assert loss.get_position().height * loss.figure.get_figheight() > 2.5


def test_a_single_step_is_marked_as_one(tmp_path, monkeypatch):
    loss, speed = axes_of(monkeypatch, [run("one", 1)], tmp_path / "a.png")
    assert loss.get_xlim() == speed.get_xlim() == (0, 2)


@pytest.mark.parametrize("change", [{"loss": [1]}, {"iteration_s": 0}, {"step": "1"}, {"tokens": "many"}])
def test_a_log_of_another_form_is_refused_with_what_it_tells(change):
    odd = replace(run("odd", 2), steps=({**run("odd", 1).steps[0], **change},))
    with pytest.raises(ValueError, match="its log must tell batch and sequence, and of each step its number"):
        check_drawable(odd)
    with pytest.raises(ValueError, match="its log must tell batch and sequence"):
        check_drawable(replace(odd, start={"settings": "none"}, steps=run("odd", 1).steps))


def test_losses_that_are_no_numbers_are_noted():
    assert check_drawable(run("one", 4)) == []
    found = check_drawable(run("nan", 5, loss=lambda step: "nan" if step == 3 else 1.0))
    assert found == ["nan: the loss of 1 of 5 steps is no finite number"]


def test_no_step_is_refused_with_the_runs_name(tmp_path):
    with pytest.raises(ValueError, match="got none in 'empty'"):
        draw_runs([run("one", 3), run("empty", 0)], tmp_path / "x.png")
    with pytest.raises(ValueError, match="got no run"):
        draw_runs([], tmp_path / "x.png")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the figure.*file/x.png"):
        draw_runs([run("one", 3)], tmp_path / "file" / "x.png")


def test_the_running_mean_is_centred():
    assert _running_mean([1.0, 2.0, 6.0, 1.0], 3) == [1.0, 3.0, 3.0, 1.0]
    assert _running_mean([1.0, math.nan, 1.0, 1.0], 1)[2:] == [1.0, 1.0]


def test_equal_names_are_numbered():
    assert _labels([run("a", 1), run("b", 1), run("a", 1)]) == ["a (1)", "b", "a (2)"]
