"""Rows to the trainer's dataset: what is kept of them, what of those that are too long, and what tells data apart."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold.lab.finetuning.encoded import Encoded, encode_rows, held_out
from stronghold.lab.finetuning.rows import Row
from stronghold.lab.finetuning.tokens import Encoder
from tests.lab.finetuning import small

ROWS = [Row(f"d.jsonl:{number}", {"prompt": "w1 w2 ", "completion": small.words(3, number)}) for number in range(1, 7)]


def encoded(rows: list[Row], sequence: int = 64, **more: Any) -> Encoded:
    tokenizer = small.tokenizer()
    encoder = Encoder(tokenizer, "a model", ids=len(tokenizer))
    return encode_rows(rows, encoder.encode, source="d.jsonl", sequence=sequence, **more)


def lengths(found: Encoded) -> list[int]:
    return [len(row["input_ids"]) for row in found.dataset]


def test_the_dataset_has_every_row_and_counts_it() -> None:
    found = encoded(ROWS)
    assert lengths(found) == [4, 5, 6, 7, 8, 9]  # two words before, the end behind
    tokenizer = small.tokenizer()
    expected = [tokenizer(f"w1 w2 {small.words(3, number)} <eos>")["input_ids"] for number in range(1, 7)]
    assert [row["input_ids"] for row in found.dataset] == expected
    assert [row["labels"] for row in found.dataset] == [[-100, -100, *ids[2:]] for ids in expected]
    assert (found.rows, found.tokens, found.learned, found.longest) == (6, 39, 27, 9)
    assert (found.cut, found.skipped) == (0, 0)


def test_rows_that_are_too_long_are_refused_with_the_first_and_how_many() -> None:
    with pytest.raises(ValueError, match=r"at d\.jsonl:4: 7 tokens, the sequence has 6; 3 rows are longer, .* has 9\)"):
        encoded(ROWS, 6)


def test_they_are_cut_or_skipped_where_that_is_asked_for() -> None:
    cut = encoded(ROWS, 6, long_rows="cut")
    assert lengths(cut) == [4, 5, 6, 6, 6, 6]
    assert (cut.cut, cut.skipped) == (3, 0)
    assert [row["input_ids"] for row in cut.dataset] == [row["input_ids"][:6] for row in encoded(ROWS).dataset]
    skipped = encoded(ROWS, 6, long_rows="skip")
    assert lengths(skipped) == [4, 5, 6]
    assert (skipped.cut, skipped.skipped) == (0, 3)
    with pytest.raises(ValueError, match=r"got none in 'd.jsonl', 6 skipped"):
        encoded(ROWS, 2, long_rows="cut")  # a prompt alone teaches nothing


def test_the_fingerprint_is_of_ids_labels_and_lengths() -> None:
    one = encoded(ROWS).fingerprint
    assert encoded(ROWS).fingerprint == one
    assert encoded(ROWS[::-1]).fingerprint != one
    texts = [Row("d", {"text": row.fields["prompt"] + row.fields["completion"]}) for row in ROWS]
    assert encoded(texts).fingerprint != one  # the same ids, all of them learned
    a, b = ([Row("d", {"text": part}) for part in parts] for parts in (("w1", "w2 w3"), ("w1 w2", "w3")))
    assert encoded(a).fingerprint != encoded(b).fingerprint


def test_rows_are_held_out_evenly() -> None:
    kept, out = held_out(ROWS, 2)
    assert out == [ROWS[0], ROWS[3]]
    assert kept == [ROWS[1], ROWS[2], ROWS[4], ROWS[5]]
    for count in (0, 6):
        with pytest.raises(ValueError, match=rf"got {count} of 6"):
            held_out(ROWS, count)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one row \(got none in 'd.jsonl', 0 skipped"):
        encoded([])
