"""Files of data to the dataset that the trainer is given: ids and labels of every row, checked."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stronghold.lab.finetuning.examples import example_of
from stronghold.lab.finetuning.rows import Row
from stronghold.lab.finetuning.tokens import IGNORED, Encode

if TYPE_CHECKING:
    from datasets import Dataset

LONG_ROWS = ("refuse", "cut", "skip")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Rows as ids: the ``dataset`` has ``input_ids`` and ``labels``; ``learned`` of its ``tokens`` have a label.

    ``longest`` is the longest row's tokens; ``cut`` and ``skipped`` say how many rows were longer than the sequence
    and what became of them. ``fingerprint`` is the CRC-32 of ids, labels and lengths.
    """

    dataset: Dataset
    rows: int
    tokens: int
    learned: int
    longest: int
    cut: int
    skipped: int
    fingerprint: int


def encode_rows(
    rows: Iterable[Row], encode: Encode, *, source: str | Path, sequence: int, long_rows: str = "refuse"
) -> Encoded:
    """Returns the rows of ``source``, encoded; they take 8 bytes a token, in memory.

    Rows of more than ``sequence`` tokens are refused, cut to their beginning, or skipped, as ``long_rows`` says; what
    has nothing left to learn once it is cut is skipped. Raises ValueError, naming file and line, for a row that cannot
    be used, for rows that are too long, of which it tells the first and how many there are, and where no row is left.
    """
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    too_long: list[tuple[str, int]] = []
    cut = skipped = 0
    for place, ids, labels in _encoded(rows, encode):
        if len(ids) > sequence:
            too_long.append((place, len(ids)))
            if long_rows != "cut" or not np.any(labels[1:sequence] != IGNORED):
                skipped += 1
                continue
            ids, labels, cut = ids[:sequence], labels[:sequence], cut + 1
        pieces.append((ids, labels))
    if too_long and long_rows == "refuse":
        place, length = too_long[0]
        raise ValueError(
            f"a row must not be longer than the sequence (at {place}: {length:,} tokens, the sequence has "
            f"{sequence:,}; {len(too_long):,} rows are longer, the longest has {max(n for _, n in too_long):,}); pass "
            "--seq with more, or --long-rows cut or skip"
        )
    if not pieces:
        raise ValueError(
            f"data must have at least one row (got none in {str(source)!r}, {skipped:,} skipped); pass other data"
        )
    return _joined(pieces, cut=cut, skipped=skipped)


def _encoded(rows: Iterable[Row], encode: Encode) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for row in rows:
        ids, labels = encode(example_of(row), row.place)
        yield row.place, np.asarray(ids, dtype=np.int32), np.asarray(labels, dtype=np.int32)


def _joined(pieces: list[tuple[np.ndarray, np.ndarray]], *, cut: int, skipped: int) -> Encoded:
    import pyarrow
    from datasets import Dataset

    lengths = np.array([len(ids) for ids, _ in pieces])
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), type=pyarrow.int64())
    columns: dict[str, Any] = {}
    crc, learned = zlib.crc32(lengths.tobytes()), 0
    for number, name in enumerate(("input_ids", "labels")):
        values = np.concatenate([piece[number] for piece in pieces])
        crc = zlib.crc32(values.tobytes(), crc)
        learned = int(np.count_nonzero(values != IGNORED))  # of the labels, which come last
        columns[name] = pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values))
    return Encoded(
        dataset=Dataset(pyarrow.table(columns)),
        rows=len(pieces),
        tokens=int(lengths.sum()),
        learned=learned,
        longest=int(lengths.max()),
        cut=cut,
        skipped=skipped,
        fingerprint=crc,
    )


def held_out(rows: Iterable[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Returns the rows without ``count`` of them, evenly spread, and those.

    Raises ValueError where none would be left.
    """
    whole = list(chain(rows))
    if not 0 < count < len(whole):
        raise ValueError(
            f"rows that are held out must leave some to train on (got {count:,} of {len(whole):,}); pass fewer"
        )
    chosen = {number * len(whole) // count for number in range(count)}
    return (
        [row for number, row in enumerate(whole) if number not in chosen],
        [row for number, row in enumerate(whole) if number in chosen],
    )
