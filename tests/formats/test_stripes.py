"""How a unit's bytes are dealt out over several files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.formats.stripes import Stripes, StripeSpan
from stronghold.native import PIECE_BYTES
from stronghold.store.mapping import map_striped

PAGE = 4096


@st.composite
def cases(draw):
    """Stripes that are few pieces long, and a range of bytes in a unit of them."""
    stripes = Stripes(draw(st.integers(1, 4)), draw(st.integers(1, 3)) * PIECE_BYTES)
    begin, end = sorted(draw(st.tuples(*[st.integers(0, 10 * PIECE_BYTES // PAGE)] * 2)))
    return stripes, begin * PAGE, end * PAGE


def place(stripes: Stripes, byte: int) -> tuple[int, int]:
    """Where one byte lies, found by dealing stripes out one by one."""
    lengths = [0] * stripes.files
    for stripe in range(byte // stripes.stripe_bytes):
        lengths[stripe % stripes.files] += stripes.stripe_bytes
    file = byte // stripes.stripe_bytes % stripes.files
    return file, lengths[file] + byte % stripes.stripe_bytes


@given(cases())
def test_spans_are_the_bytes_in_order_each_where_dealing_them_out_puts_it(case):
    stripes, begin, end = case
    at = begin
    for span in stripes.spans(begin, end):
        assert span.begin == at < span.end
        assert place(stripes, span.begin) == (span.file, span.offset)
        assert place(stripes, span.end - 1) == (span.file, span.offset + span.end - span.begin - 1)
        at = span.end
    assert at == max(begin, end)


@given(cases())
def test_transfers_are_the_same_bytes_and_the_drives_take_turns(case):
    stripes, begin, end = case
    transfers = list(stripes.transfers(begin, end, PIECE_BYTES))
    at = begin
    for span in sorted(transfers, key=lambda span: span.begin):
        assert span.begin == at < span.end
        assert place(stripes, span.begin) == (span.file, span.offset)
        assert stripes.files == 1 or span.end - span.begin <= PIECE_BYTES
        at = span.end
    assert at == max(begin, end)
    totals = [sum(span.file == file for span in transfers) for file in range(stripes.files)]
    begun = [0] * stripes.files
    for span in transfers:
        begun[span.file] += 1
        waiting = [count for count, total in zip(begun, totals, strict=True) if count < total]
        assert stripes.files == 1 or max(begun) - min([max(begun), *waiting]) <= 1


@given(cases())
def test_a_share_is_what_the_spans_put_into_a_file(case):
    stripes, _, end = case
    for file in range(stripes.files):
        lengths = [span.end - span.begin for span in stripes.spans(0, end) if span.file == file]
        assert stripes.share(file, end) == sum(lengths)


@pytest.mark.parametrize(("files", "capacity"), [(1, 10**12), (2, 1), (2, 300 * 2**20), (3, 20 * 2**30)])
def test_a_unit_has_few_stripes_of_whole_pieces(files, capacity):
    stripes = Stripes.over(files, capacity, PIECE_BYTES)
    assert stripes.stripe_bytes % PIECE_BYTES == 0
    assert len(list(stripes.spans(0, capacity))) <= (1 if files == 1 else 64)


def test_spans_by_hand():
    stripes = Stripes(2, PIECE_BYTES)
    assert list(stripes.spans(PAGE, 2 * PIECE_BYTES + PAGE)) == [
        StripeSpan(0, PAGE, PAGE, PIECE_BYTES),
        StripeSpan(1, 0, PIECE_BYTES, 2 * PIECE_BYTES),
        StripeSpan(0, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + PAGE),
    ]


@pytest.mark.parametrize("files", [1, 2, 3])
def test_the_mapping_shows_the_files_as_one(tmp_path, files):
    capacity = 5 * PIECE_BYTES + PAGE
    stripes, paths = Stripes(files, PIECE_BYTES if files > 1 else 6 * PIECE_BYTES), []
    content = np.random.default_rng(0).integers(0, 256, capacity, dtype=np.uint8)
    parts = [[] for _ in range(files)]
    for span in stripes.spans(0, capacity):
        parts[span.file].append(content[span.begin : span.end])
    for number, found in enumerate(parts):
        paths.append(tmp_path / f"{number}.bin")
        np.concatenate(found).tofile(paths[-1])
    memory = map_striped(paths, stripes, capacity)
    shown = np.frombuffer(memory, dtype=np.uint8)
    assert np.array_equal(shown, content)
    shown[-1] ^= 255  # a write goes to the file that has it
    last = list(stripes.spans(0, capacity))[-1]
    assert np.fromfile(paths[last.file], dtype=np.uint8)[-1] == content[-1] ^ 255


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        map_striped([tmp_path / "absent", tmp_path / "too"], Stripes(2, PIECE_BYTES), 2 * PIECE_BYTES)
