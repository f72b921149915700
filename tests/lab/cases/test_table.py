"""Tables and CSV: the records' numbers, and the artifact's beside them."""

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from stronghold.lab.cases.case import CASES
from stronghold.lab.cases.machines import TINY
from stronghold.lab.cases.points import show
from stronghold.lab.cases.table import COLUMNS, csv_text, format_value, tables
from tests.lab.cases.conftest import make_record, make_trial


def text(*printed):
    console = Console(width=200, file=io.StringIO())
    console.print(*printed)
    return console.file.getvalue()


def test_the_csv_has_every_number_unrounded(measure):
    runs = measure(make_record("megatron-lm", seconds=0.3, window="auto"), make_record(seconds=0.7, wrong="bad"))
    rows = list(csv.DictReader(io.StringIO(csv_text(show(CASES[3], TINY, runs)))))
    assert list(rows[0]) == list(COLUMNS)
    first, second = rows[:2]
    assert (first["origin"], first["method"], first["window"]) == ("measured", "megatron-lm", "")
    assert float(first["value"]) == 2 / 0.3
    assert [float(second[name]) for name in ("value", "low", "high")] == pytest.approx([2 / 0.7, 2 / 0.84, 2 / 0.63])
    assert (second["window"], second["wrong"], second["source"]) == ("1", "bad", "record 2")
    assert (second["first_loss"], second["last_loss"], second["commit"]) == ("6.5", "6.25", "a" * 40)
    assert (second["machine"], second["preset"], second["quantity"]) == (
        "Some CPU, 2 cores, 8.00 GiB", "tiny", "samples_per_s",
    )  # fmt: skip
    published = {row["method"]: float(row["value"]) for row in rows if row["origin"] == "published"}
    assert published["megatron-lm"] == 0.7496
    assert len(rows) == 2 + 5


def test_the_artifacts_number_stands_beside_runs_of_its_own_models_alone(measure):
    """Seconds of a V100 for another model say nothing beside those of a CPU."""
    runs = measure(make_record("megatron-lm", seconds=0.25), make_record(seconds=0.5, wrong="bad"))
    here, _ = tables(show(CASES[2], TINY, runs))
    assert "artifact" not in text(here).splitlines()[3]
    assert "0.7496" not in text(here)


def test_the_table_has_the_artifacts_number_beside_each(measure):
    runs = measure(make_record("megatron-lm", seconds=0.25), make_record(seconds=0.5, wrong="bad"))
    here, published = tables(show(CASES[2], replace(TINY, name="v100"), runs))
    lines = text(here).splitlines()
    (megatron,) = [line for line in lines if line.count("Megatron-LM") == 2]
    assert [cell.strip() for cell in megatron.split("│")[1:-1]] == [
        "Megatron-LM", "Megatron-LM", "2", "", "2 k", "8.000", "6.667 to 8.889", "6.500 to 6.250", "1000 B", "2.93 KiB",
        "0.7496",
    ]  # fmt: skip
    (ours,) = [line for line in lines if "STRONGHOLD" in line]
    assert "6.250 WRONG" in ours
    assert "0.6647" in ours
    assert "0.05290" in text(published)
    assert "artifact │" not in text(published)


def test_the_largest_models_table_says_none_where_none_trained(measure):
    trials = measure(make_trial(), make_trial("megatron-lm", 1, reason="late"))
    here, _ = tables(show(CASES[1], TINY, trials))
    (none,) = [line for line in text(here).splitlines() if "Megatron-LM" in line]
    assert [cell.strip() for cell in none.split("│")[1:4]] == ["Megatron-LM", "none", ""]
    assert "5.141 B" not in text(here), "the artifact's, of another model"


@pytest.mark.parametrize(
    ("number", "value", "expected"),
    [
        (1, 1_716_588_544, "1.717 B"),
        (1, 0, "none"),
        (3, 0.7496, "0.7496"),
        (4, 21.00425, "21.00"),
        (4, 1234.5, "1,234"),
    ],
)
def test_values_have_the_digits_that_say_something(number, value, expected):
    assert format_value(CASES[number], value) == expected
