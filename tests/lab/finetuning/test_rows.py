"""Files to rows with their places, and what is said of files that are no data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from stronghold.lab.finetuning.rows import read_rows
from tests.lab.finetuning.small import write_lines

ROWS: list[dict[str, Any]] = [
    {"prompt": "w1 é", "completion": "w2"},
    {"messages": [{"role": "user", "content": "w3\nw4"}, {"role": "assistant", "content": "w5"}]},
    {"text": "w6"},
]


def found(source: Path | str) -> list[tuple[str, dict[str, Any]]]:
    return [(row.place, row.fields) for row in read_rows(source)]


def test_every_kind_of_file_gives_the_same_rows_with_their_places(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ROWS)
    assert found(lines) == [(f"{lines}:{number}", row) for number, row in enumerate(ROWS, start=1)]
    pretty = tmp_path / "b.json"
    pretty.write_text("\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    begins = [number for number, line in enumerate(pretty.read_text("utf-8-sig").split("\n"), 1) if line == "  {"]
    assert found(pretty) == [(f"{pretty}:{line}", row) for line, row in zip(begins, ROWS, strict=True)]
    as_lines = tmp_path / "c.json"
    as_lines.write_text("\n" + lines.read_text().replace("\n", "\n\n"), encoding="utf-8")
    assert found(as_lines) == [(f"{as_lines}:{line}", row) for line, row in zip((2, 4, 6), ROWS, strict=True)]
    table = tmp_path / "d.parquet"
    fields = dict.fromkeys(name for row in ROWS for name in row)
    datasets.Dataset.from_list([fields | row for row in ROWS]).to_parquet(table)  # a table has each in every row
    assert found(table) == [(f"{table}, row {number}", row) for number, row in enumerate(ROWS, start=1)]
    assert [fields for _, fields in found(tmp_path)] == 4 * ROWS
    assert [fields for _, fields in found(f"{tmp_path}/*.json")] == 2 * ROWS


def test_an_empty_list_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" [ ] ")
    assert found(tmp_path / "a.json") == []


GOOD = '{"text": "w1"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", f'{GOOD}\n{GOOD}\n{{"text": "w', r"a\.jsonl:3: Unterminated string .*cut short"),
        ("a.jsonl", f"{GOOD}\n\n[1]\n", r"at .*a\.jsonl:3: got a list"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: .*invalid start byte"),
        ("a.json", f"[\n{GOOD},\n{GOOD[:-1]}", r"a\.json:3, in the row that begins in line 3: .*cut short"),
        ("a.json", f'[\n{GOOD},\n{{"text":\n', r"a\.json:4, in the row that begins in line 3: "),
        ("a.json", f"[\n{GOOD},\n", r"a\.json:3, in the row that begins in line 3: Expecting value"),
        ("a.json", f"[\n{GOOD}\n{GOOD}]", r"a\.json:3: neither a comma nor the end .*cut short"),
        ("a.json", f"[\n{GOOD}\n", r"a\.json:3: neither a comma nor the end .*cut short"),
        ("a.json", f"[\n{GOOD}]\n[{GOOD}]", r"one list of JSON and nothing else \(at .*a\.json:3: more behind"),
        ("a.json", b"[\n{\xff", r"a\.json:2: .*invalid start byte"),
        ("a.json", "[\n3]", r"a\.json:2: got a int"),
        ("a.csv", "text\nw1\n", r"files called \.jsonl, \.ndjson, \.json, \.parquet \(got .*a\.csv"),
        ("a.parquet", b"PAR1", r"must be Parquet that can be read \(at .*a\.parquet: .*cut short"),
    ],
)
def test_a_file_that_is_no_data_is_told_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        found(tmp_path / name)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_parquet_file_that_was_cut_short_is_told(tmp_path: Path, share: float) -> None:
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"text": f"w{number}"} for number in range(3000)]).to_parquet(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"at .*a\.parquet.*cut short"):
        found(file)


def test_a_parquet_file_with_a_broken_page_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"text": f"w{number}"} for number in range(3000)]).to_parquet(file)
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"at .*a\.parquet.*cut short"):
        found(file)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got '.*nowhere\.jsonl', which gives none"):
        found(tmp_path / "nowhere.jsonl")
