"""The page as HTML: what is in it, that records cannot break out of it, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser

import pytest

from stronghold.lab.page.page import write_page
from stronghold.lab.page.section import Figure
from stronghold.lab.page.step import busy
from stronghold.lab.records.timeline import rows, write_spans
from stronghold.spans import Span
from tests.lab.page.examples import ARM, EPYC, machine, record, start, summary, write_lines, write_log

EVIL = "</script ></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
SPANS = [
    Span("compute", "forward 0", 0.0, 0.25),
    Span("disk reads", "read 1", 0.1, 0.4),
    Span("disk reads", "read 2", 0.3, 0.5),
]
_VOID = {"meta", "link", "img", "br", "line", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """A page's elements as (tag, attributes, own text), their nesting checked."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in _VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        if self.open:
            self.open[-1][2] += text

    def texts(self, *tags):
        return [text for tag, _, text in self.elements if tag in tags]

    def all(self, *tags):
        return [(tag, attributes) for tag, attributes, _ in self.elements if tag in tags]


def page_of(results, **options):
    path = results / "report.html"
    notes = write_page(results, path, **options)
    return Page(path.read_text(encoding="utf-8")), notes


@pytest.fixture
def results(tmp_path):
    write_spans(write_log(tmp_path, "a") / "timeline.json", SPANS)
    write_log(tmp_path, "b", losses=[3.0, "nan", 1.0])
    return tmp_path


def test_the_page_has_its_sections_tables_curves_and_timeline(results):
    page, notes = page_of(results)
    titles = ["Machine", "Methods and runs", "Loss", "Memory", "One step", "Left out"]
    assert page.texts("h2") == titles
    assert [attributes["href"] for _, attributes in page.all("a")] == [
        f"#{attributes['id']}" for _, attributes in page.all("section")
    ]
    cells = page.texts("th", "td")
    for text in ("a", "stronghold", "1.2 M (4 x 64)", "3 of 2 x 32", "128", "500 ms (400 ms to 600 ms)", "2.00 GiB"):
        assert text in cells, text
    assert "0123456789-dirty" in cells and "4.0000 → 3.0000" in cells and "1.00 GiB held" in cells
    assert [attributes["aria-label"] for _, attributes in page.all("svg")] == [
        "Training loss",
        "Host: the process's peak so far",
        "Device",
    ]
    assert notes == ("b: the loss of 1 of 3 steps is no finite number",)
    assert notes[0] in page.texts("li")


def test_a_run_that_does_not_tell_the_device_s_memory_has_no_curve_of_it(tmp_path):
    """Its curve lay on 0, and the table said "0 B held"."""
    log = write_log(tmp_path, "a") / "log.jsonl"
    log.write_text(log.read_text().replace(f'"device_bytes": {2**30}', '"device_bytes": 0'))
    page, _ = page_of(tmp_path)
    assert "not told" in page.texts("th", "td")
    assert "Device" not in [attributes["aria-label"] for _, attributes in page.all("svg")]


def test_rows_of_their_own_lengths_are_told_as_such(tmp_path):
    log = write_log(tmp_path, "a") / "log.jsonl"
    told = log.read_text().replace('"iteration_s": 0.5, ', '"iteration_s": 0.5, "tokens": 40, "step_tokens": 40, ')
    log.write_text(told)
    assert "3 of 2 x up to 32" in page_of(tmp_path)[0].texts("td")


def test_the_timeline_s_data_are_the_spans_in_their_rows(results):
    page, _ = page_of(results)
    (data,) = [text for tag, attributes, text in page.elements if attributes.get("id") == "spans"]
    drawn = json.loads(data)
    assert [(row["lane"], row["spans"]) for row in drawn] == [
        (lane, [[s.name, s.begin_s * 1e3, pytest.approx((s.end_s - s.begin_s) * 1e3)] for s in row])
        for lane, row in rows(SPANS)
    ]
    cells = page.texts("td")
    assert {"250.000 ms", "50.0%", "400.000 ms", "80.0%"} <= set(cells)


@pytest.mark.parametrize(
    ("spans", "seconds"), [([(0, 1), (0.5, 2), (3, 4)], 3), ([], 0), ([(0, 5), (1, 2), (4, 4)], 5)]
)
def test_a_lane_is_busy_while_anything_of_it_is_under_way(spans, seconds):
    assert busy([Span("x", "", begin, end) for begin, end in spans]) == seconds


def test_nothing_of_a_record_becomes_part_of_the_page_s_code(tmp_path):
    folder = write_log(tmp_path, "a", host={**EPYC, "processor": EVIL, "system": EVIL})
    folder = folder.rename(folder.with_name(EVIL.replace("/", "-")))
    write_spans(folder / "timeline.json", [Span(EVIL, EVIL, 0.0, 1.0)])
    line = record("b")
    line["settings"] |= {"method": EVIL, "out": EVIL, "path": EVIL, "dtype": EVIL}
    line["machine"]["versions"]["torch"] = EVIL
    line["machine"]["commit"] = EVIL
    write_lines(tmp_path / "runs.jsonl", [line, EVIL + "\n", {"settings": {"method": EVIL}}])
    page, _ = page_of(tmp_path, figures=[Figure(title=EVIL, svg=f"<svg>{EVIL}</svg>", caption=EVIL)])
    assert [attributes.get("type") for _, attributes in page.all("script")] == ["application/json", None]
    assert all(attributes["src"].startswith("data:image/svg+xml;base64,") for _, attributes in page.all("img"))
    assert not any(name.startswith("on") for _, attributes, _ in page.elements for name in attributes)
    (data,) = [text for _, attributes, text in page.elements if attributes.get("id") == "spans"]
    assert json.loads(data)[0]["spans"] == [[EVIL, 0.0, 1000.0]]
    assert EVIL in page.texts("td") and EVIL in page.texts("figcaption")


def test_the_page_loads_nothing(results):
    write_page(results, path := results / "report.html")
    text = path.read_text()
    assert not re.search(r"https?:|@import|url\(", text)
    (policy,) = [a["content"] for _, a in Page(text).all("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_runs_of_different_machines_are_in_tables_and_charts_of_their_own(tmp_path):
    write_log(tmp_path, "a")
    write_log(tmp_path, "b", host=ARM)
    page, _ = page_of(tmp_path)
    assert page.texts("h2")[0] == "Machines"
    headings = ["Arm, 8 cores, 16.0 GiB", "EPYC, 2 cores, 24.0 GiB"]
    assert page.texts("h3") == headings * 4
    text = (tmp_path / "report.html").read_text()
    tables = [Page(table).texts("th") for table in re.findall("<table>.*?</table>", text)]
    assert [(("a" in table), ("b" in table)) for table in tables] == [(False, True), (True, False)]
    assert len(page.all("svg")) == 6


def test_figures_come_as_images_with_their_captions(results):
    page, _ = page_of(results, figures=[Figure(title="Case 1", svg="<svg/>", caption="what & why")])
    assert page.texts("h2")[2] == "Figures"
    assert page.all("img") == [
        ("img", {"class": "paper", "src": "data:image/svg+xml;base64,PHN2Zy8+", "alt": "Case 1"})
    ]
    assert page.texts("figcaption") == ["what & why"]


def test_without_logs_and_timelines_the_page_says_so(tmp_path):
    write_lines(tmp_path / "runs.jsonl", [record("a")])
    page, notes = page_of(tmp_path)
    assert page.texts("p").count("No run here has a log of its steps.") == 2
    assert "No timeline was recorded." in page.texts("p")
    assert not page.all("canvas", "svg")
    assert len(notes) == 2 and list(notes) == page.texts("li")


def test_older_and_stranger_records_show_what_they_have(tmp_path):
    older = {"settings": {"method": "l2l", "out": "runs/older"}, "summary": {"samples_per_s": 2.5}}
    strange = {
        "settings": {name: {} for name in start("")["settings"]} | {"out": "strange"},
        "machine": {name: 1 for name in machine()},
        "summary": {name: [] for name in summary()},
        "parameters": "many",
        "interrupted": [],
    }
    write_lines(tmp_path / "runs.jsonl", [older, strange])
    folder = write_log(tmp_path, "steps", end=False)
    log = (folder / "log.jsonl").read_text().replace('"peak_host_bytes"', '"once"')
    (folder / "log.jsonl").write_text(log + json.dumps({"event": "end", "summary": summary()}))
    page, notes = page_of(tmp_path)
    assert {"older", "strange", "steps"} <= set(page.texts("th"))
    assert "2.5" in page.texts("td") and "l2l" in page.texts("td")
    said = "\n".join(notes)
    assert re.search(r"older: model, .*loss.* not recorded, in a record of another or an older form", said)
    assert "no curve of peak_host_bytes of steps: a step of its log has none" in said


def test_many_long_runs_and_a_long_timeline_make_a_page_below_two_megabytes(tmp_path):
    for number in range(40):
        losses = [3.0 + step * 37 % 11 / 10 for step in range(600)]
        folder = write_log(tmp_path, f"stronghold_l-16_h-2048_bs-4_ws-8_{number}", steps=600, losses=losses)
    spans = [Span("disk reads", f"read {n}", n * 1e-3, n * 1e-3 + (n % 7 + 1) * 1e-4) for n in range(35_000)]
    write_spans(folder / "timeline.json", spans)
    page, notes = page_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert any("each point is the mean" in text for text in page.texts("p"))
    assert any(note.startswith("15000 of 35000 parts of the timeline, of 0.4 ms or less") for note in notes)


def test_a_page_that_cannot_be_written_is_named(results):
    (results / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the page.*file/report.html"):
        write_page(results, results / "file" / "report.html")
