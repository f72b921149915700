"""Rows of data from files: JSON lines, a JSON list, Parquet. Each row knows the file and the line that it comes from.

``datasets`` reads the same files and does not say which line was wrong, so that JSON is read here, and Parquet by
pyarrow, which ``datasets`` brings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stronghold.lab.data.text import find_files

KINDS = (".jsonl", ".ndjson", ".json", ".parquet")
_CUT = "the file may have been cut short: write or download it again, or mend or remove that line"
_CUT_TABLE = "the file may have been cut short: write or download it again"


@dataclass(frozen=True)
class Row:
    """One row: its fields by name, and its ``place``, such as ``data.jsonl:3`` or ``data.parquet, row 3``."""

    place: str
    fields: dict[str, Any]


def read_rows(source: str | Path) -> Iterator[Row]:
    """Yields the rows of ``source``, in order: a file, all files below a folder, or a glob's.

    Empty lines are left out, and so are fields that are null. Raises ValueError, naming the file and the line, for
    what cannot be read, and for files that hold something else.
    """
    files = find_files(source)
    for file in files:
        if file.suffix.lower() not in KINDS:
            raise ValueError(
                f"data to fine-tune on are files called {', '.join(KINDS)} (got {str(file)!r}); rename it if it is "
                "one, or leave it out with a glob such as 'folder/**/*.jsonl'"
            )
    for file in files:
        if file.suffix.lower() == ".parquet":
            yield from _parquet(file)
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"a data file must be readable (got {error.strerror} for {str(file)!r})") from error
        is_list = file.suffix.lower() == ".json" and content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        yield from _json_list(file, content) if is_list else _json_lines(file, content)


def _json_lines(file: Path, content: bytes) -> Iterator[Row]:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise ValueError(f"each line of a data file must be JSON (at {place}: {error}); {_CUT}") from error
        yield _row(place, found)


def _json_list(file: Path, content: bytes) -> Iterator[Row]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise ValueError(f"a data file must be UTF-8 text (at {file}:{line}: {error}); {_CUT}") from error
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    position = _skip(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        place = f"{file}:{line}"
        try:
            found, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = f"{file}:{getattr(error, 'lineno', line)}"
            raise ValueError(
                f"a data file must hold a whole list of JSON (at {at}, in the row that begins in line {line}: "
                f"{error}); {_CUT}"
            ) from error
        yield _row(place, found)
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "]":
            line += text.count("\n", counted, position)
            raise ValueError(
                f"a data file must hold a whole list of JSON (at {file}:{line}: neither a comma nor the end behind a "
                f"row); {_CUT}"
            )
    if (behind := _skip(text, position + 1)) < len(text):
        line = 1 + text.count("\n", 0, behind)
        raise ValueError(
            f"a data file must hold one list of JSON and nothing else (at {file}:{line}: more behind its end); write "
            "the rows of several lists into one, or a row in each line (.jsonl)"
        )


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for found in batch.to_pylist():
                    number += 1
                    yield _row(f"{file}, row {number}", found)
    except (pyarrow.ArrowException, OSError) as error:
        problem = " ".join(str(error).split())[:200]
        behind = f", behind row {number}" if number else ""
        raise ValueError(
            f"a data file must be Parquet that can be read (at {file}{behind}: {problem}); {_CUT_TABLE}"
        ) from error


def _row(place: str, found: Any) -> Row:
    if not isinstance(found, dict):
        raise ValueError(
            f"a row must be an object with named fields (at {place}: got a {type(found).__name__}); write it as "
            '{"prompt": …, "completion": …}, or remove it'
        )
    return Row(place, {name: value for name, value in found.items() if value is not None})
