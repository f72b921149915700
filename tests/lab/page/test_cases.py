"""The paper's cases on the page: a figure for each machine, and what has none."""

import re

from stronghold.lab.page.cases import case_figures
from stronghold.lab.records.json_lines import append_record
from tests.lab.cases.conftest import HOST, make_record

GPU = {"gpus": [{"name": "Some GPU", "memory_bytes": 2**34}]}
OTHER = {"host": HOST | {"processor": "Other CPU"}}


def test_each_machine_has_a_figure_of_its_own(tmp_path):
    append_record(tmp_path / "runs.jsonl", make_record(seconds=0.5))
    append_record(tmp_path / "runs.jsonl", make_record(seconds=0.25, machine=OTHER))
    append_record(tmp_path / "runs.jsonl", make_record(seconds=0.125, machine=GPU, settings={"device": "cuda"}))
    figures, notes = case_figures(tmp_path)
    windows = [figure for figure in figures if figure.title.endswith("(figure 9)")]
    assert [figure.caption for figure in windows] == [
        "Settings tiny, measured on Other CPU, 2 cores, 8.00 GiB.",
        "Settings tiny, measured on Some CPU, 2 cores, 8.00 GiB.",
        "Settings tiny, measured on Some GPU 16.0 GiB, Some CPU, 2 cores, 8.00 GiB.",
    ]
    assert [re.findall(r">(0\.\d{4})<", figure.svg) for figure in windows] == [["0.2500"], ["0.5000"], ["0.1250"]]
    assert all(figure.svg.count("1 results are left out: measured on") == 2 for figure in windows)
    assert [note.split(" (")[0] for note in notes] == ["case 1"]


def test_a_wrong_loss_is_in_the_caption(tmp_path):
    append_record(tmp_path / "runs.jsonl", make_record(wrong="its loss is off"))
    figures, _ = case_figures(tmp_path)
    assert {figure.caption.partition(". ")[2] for figure in figures} == {
        "Wrong losses: stronghold, 2 layers, window 1: its loss is off."
    }


def test_cases_without_runs_are_noted_where_others_have_some(tmp_path):
    append_record(tmp_path / "runs.jsonl", make_record())
    figures, notes = case_figures(tmp_path)
    without = [note.rpartition(": ")[2] for note in notes]
    assert figures
    assert set(without) < {f"examples/case{number}_run.sh makes them" for number in range(1, 6)}
    assert len(without) == 5 - len({figure.title for figure in figures})


def test_a_folder_that_has_nothing_of_the_cases_has_no_notes_on_them(tmp_path):
    append_record(tmp_path / "runs.jsonl", make_record("gemini"))
    assert case_figures(tmp_path) == ([], [])
    assert case_figures(tmp_path / "absent") == ([], [])


def test_what_no_figure_could_take_is_noted(tmp_path):
    append_record(tmp_path / "runs.jsonl", make_record())
    append_record(tmp_path / "runs.jsonl", make_record("gemini"))
    _, notes = case_figures(tmp_path)
    assert notes[0].startswith(f"of the cases' figures, {tmp_path}/runs.jsonl, record 2 is left out: a method must be")
