"""The page in a browser, as wide as a phone and as a desk's screen, with the timeline of a real step."""

import pytest
import torch
from torch import nn

import stronghold
from stronghold.lab.page.page import write_page
from stronghold.lab.page.section import Figure
from stronghold.lab.records.timeline import read_spans, write_spans
from stronghold.spans import Span
from tests.lab.page.browser import CHROMIUM, Browser
from tests.lab.page.examples import ARM, record, write_lines, write_log

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"),
    pytest.mark.timeout(180),
]
PHONE, DESK = (360, 740), (1280, 800)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300"><rect width="800" height="300"/></svg>'
EVIL = "</script x><img src=x onerror=ran=1></script><script>ran=1</script>"


def traced(folder):
    """Returns the spans of one step of a small model with its layers on disk."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    model = stronghold.offload(model, window=2, device="cpu", store=folder)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    for _ in range(2):
        with stronghold.trace(model) as timeline:
            model(torch.ones(512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
    return timeline.spans()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with runs of three machines, long names, a long run, a figure, notes, and texts that are code."""
    results = tmp_path_factory.mktemp("results")
    folder = write_log(results, "stronghold_l-100_h-2048_bs-1_ws-2_2026-11-21_19-41-49", steps=900)
    spans = traced(tmp_path_factory.mktemp("store"))
    write_spans(folder / "timeline.json", [*spans, Span(EVIL, EVIL, 0.0, 1e-4)])
    write_log(results, "x" * 120, host=ARM)
    lines = [record("a", host={**ARM, "processor": EVIL, "system": EVIL}), EVIL + "\n", "{"]
    write_lines(results / "runs.jsonl", lines)
    figures = [Figure(title=EVIL, svg=SVG, caption="A wide one.")]
    assert write_page(results, results / "report.html", figures=figures)
    return results / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(params=[PHONE, DESK], ids=["phone", "desk"])
def opened(request, browser, page):
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page.as_uri(), width=request.param[0], height=request.param[1])
    yield browser
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("typeof ran") == "undefined"


def shown(browser):
    """Returns the range that the timeline shows, in milliseconds."""
    box = "document.getElementById('timeline').dataset"
    return browser.evaluate(f"[Number({box}.begin), Number({box}.end)]")


def computation(page, name):
    """Returns the part of the first lane that is called ``name``."""
    spans = read_spans(next(page.parent.glob("runs/*/timeline.json")))
    return next(span for span in spans if (span.lane, span.name) == ("compute", name))


def middle_of(browser, span):
    """Returns where the middle of a part of the first lane is on the screen, the timeline scrolled there."""
    browser.evaluate("document.querySelector('canvas').scrollIntoView({block: 'center'})")
    browser.settle()
    left, top, width = browser.evaluate(
        "(() => { const frame = document.querySelector('canvas').getBoundingClientRect();"
        " return [frame.left, frame.top, frame.width]; })()"
    )
    begin, end = shown(browser)
    gutter = browser.evaluate("Number(document.getElementById('timeline').dataset.gutter)")
    share = ((span.begin_s + span.end_s) / 2 * 1e3 - begin) / (end - begin)
    return left + 1 + gutter + share * (width - 2 - gutter), top + 45


def tip(browser):
    return browser.evaluate(
        "(() => { const t = document.querySelector('.tip'); return t.hidden ? '' : t.innerText })()"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen(browser, page, dark):
    for width, height in (PHONE, DESK):
        browser.open(page.as_uri(), width=width, height=height, dark=dark)
        assert browser.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]") <= [width, width]
        bright = browser.evaluate("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert (bright < 60) == dark


def test_the_timeline_is_drawn_in_its_lanes_colours(opened, page):
    drawn = opened.evaluate(
        "(() => { const c = document.querySelector('canvas');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = {};"
        " for (let n = 0; n < d.length; n += 4) seen[[d[n], d[n + 1], d[n + 2]]] = 1;"
        " return [...document.querySelectorAll('#one-step .swatch')].map((s) =>"
        "   [s.parentElement.innerText, seen[getComputedStyle(s).backgroundColor.match(/\\d+/g)] === 1]); })()"
    )
    assert [lane for lane, _ in drawn][:3] == ["compute", "waits", "fetches"]
    assert {lane: found for lane, found in drawn if lane not in ("waits", "root")} == {
        name: True for name in ("compute", "fetches", "gradients", "updates", "disk reads", "disk writes", EVIL)
    }


def test_buttons_and_keys_zoom_and_move(opened):
    whole = shown(opened)
    assert whole[0] == 0 and whole[1] > 0
    opened.evaluate("document.querySelector('[data-do=in]').click()")
    opened.settle()
    begin, end = shown(opened)
    assert (end - begin, begin + end) == (pytest.approx(whole[1] / 2), pytest.approx(whole[1]))
    assert " ms to " in opened.evaluate("document.querySelector('output').innerText")
    opened.evaluate("document.querySelector('canvas').focus()")
    opened.press("+")
    opened.press("ArrowLeft")
    left = shown(opened)
    assert left[1] - left[0] == pytest.approx(whole[1] / 4)
    assert left[0] == pytest.approx(whole[1] * (3 / 8 - 1 / 20))
    opened.press("ArrowRight")
    opened.press("-")
    assert shown(opened) == [pytest.approx(begin), pytest.approx(end)]
    opened.evaluate("document.querySelector('[data-do=whole]').click()")
    opened.settle()
    assert shown(opened) == whole
    for _ in range(40):
        opened.press("+")
    begin, end = shown(opened)
    assert 0 <= begin < end <= whole[1]


def test_the_wheel_zooms_where_it_points_and_dragging_moves(opened, page):
    span = computation(page, "backward 3")
    x, y = middle_of(opened, span)
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    whole_ms = opened.evaluate("Number(document.getElementById('timeline').dataset.whole)")
    begin, end = shown(opened)
    assert end - begin < 0.8 * whole_ms
    assert middle_of(opened, span)[0] == pytest.approx(x, abs=1)
    if opened.evaluate("innerWidth") < 600:
        return  # a finger drags
    opened.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    opened.mouse("mouseMoved", x - 50, y, button="left", buttons=1)
    opened.mouse("mouseReleased", x - 50, y, button="left", clickCount=1)
    assert middle_of(opened, span)[0] == pytest.approx(x - 50, abs=1)
    for _ in range(9):
        opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=300)
    assert shown(opened) == [0, whole_ms]


def test_a_part_that_is_pointed_at_or_tapped_tells_its_times(opened, page):
    span = computation(page, "backward 3")
    x, y = middle_of(opened, span)
    if opened.evaluate("innerWidth") < 600:
        opened.touch("touchStart", (x, y))
        opened.touch("touchEnd")
    else:
        opened.mouse("mouseMoved", x, y)
    *names, begins, takes = tip(opened).split("\n")
    assert names == ["backward 3", "compute"]
    for told, seconds in ((begins, span.begin_s), (takes, span.end_s - span.begin_s)):
        assert told.endswith(" ms")  # of three places, of which the last may be rounded otherwise
        assert float(told.split()[-2].replace(",", "")) == pytest.approx(1e3 * seconds, abs=0.00101)
    assert (begins[:10], takes[:6]) == ("begins at ", "takes ")
    frame = "document.querySelector('.tip').getBoundingClientRect()"
    assert opened.evaluate(f"{frame}.left >= 0 && {frame}.right <= innerWidth")
    opened.evaluate("document.querySelector('canvas').focus()")
    opened.press("+")
    assert tip(opened) == ""


def test_a_name_that_is_code_is_shown_as_text(opened):
    x, _ = middle_of(opened, Span(EVIL, EVIL, 0.0, 1e-4))
    bottom = opened.evaluate("document.querySelector('canvas').getBoundingClientRect().bottom")
    opened.mouse("mouseMoved", x, bottom - 15)
    assert tip(opened).split("\n")[:2] == [EVIL, EVIL]


def test_fingers_move_and_pinch(browser, page):
    browser.open(page.as_uri(), width=PHONE[0], height=PHONE[1])
    span = computation(page, "backward 3")
    x, y = middle_of(browser, span)
    whole = shown(browser)
    browser.touch("touchStart", (x - 20, y), (x + 20, y))
    for reach in (30, 40, 50, 60):
        browser.touch("touchMove", (x - reach, y), (x + reach, y))
    browser.touch("touchEnd")
    begin, end = shown(browser)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 3, rel=0.05)
    assert middle_of(browser, span)[0] == pytest.approx(x, abs=3)
    browser.touch("touchStart", (x, y))
    for by in (20, 40, 60):
        browser.touch("touchMove", (x - by, y))
    browser.touch("touchEnd")
    moved = shown(browser)
    assert moved[1] - moved[0] == pytest.approx(end - begin)
    assert moved[0] > begin
