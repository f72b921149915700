"""How a unit's update is cut: every element once and in order, whole pages, no chunk over its limit."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.layout import GRAIN, PAGE_BYTES, Part, lay_out, round_up, shares
from stronghold.store.chunks import Array, chunks, spans

LIMIT = 4 * 14 * GRAIN


def file_of(elements, kinds):
    """Lays out arrays as a unit's file has them: one kind after the other, each tensor on a page of its own."""
    arrays, end = [[] for _ in elements], 0
    for width, per in kinds:
        layout = lay_out([-(-count // per) * width for count in elements], PAGE_BYTES)
        for own, offset in zip(arrays, layout.offsets, strict=True):
            own.append(Array(end + offset, width, per))
        end = round_up(end + layout.total_bytes, PAGE_BYTES)
    return arrays


def whole(elements):
    return [Part(number, 0, count) for number, count in enumerate(elements)]


FP32 = [(2, 1), (2, 1), (4, 1), (4, 1)]
EIGHT_BIT = [(2, 1), (2, 1), (1, 1), (1, 1), (1, 64), (1, 64)]
counts = st.lists(st.one_of(st.integers(1, 3000), st.integers(GRAIN - 2, 9 * GRAIN + 70)), min_size=1, max_size=7)


@given(counts, st.sampled_from([FP32, EIGHT_BIT]))
def test_every_element_is_in_one_chunk_and_no_chunk_is_over_its_limit(elements, kinds):
    arrays = file_of(elements, kinds)
    cut = chunks(whole(elements), arrays, LIMIT)
    reached = [0] * len(elements)
    last = 0
    for chunk in cut:
        runs = spans(chunk, arrays)
        assert sum(end - begin for begin, end in runs) <= LIMIT
        for part in chunk:
            assert part.number >= last, "parameters out of order"
            last = part.number
            assert part.begin == reached[part.number]
            assert part.begin % GRAIN == 0
            reached[part.number] = part.end
            for array in arrays[part.number]:
                begin, end = array.span(part.begin, part.end)
                assert begin % PAGE_BYTES == 0, "a part's array begins within a page"
                assert any(first <= begin and end <= stop for first, stop in runs)
    assert reached == elements


@given(counts, st.sampled_from([FP32, EIGHT_BIT]))
def test_no_two_chunks_share_a_page(elements, kinds):
    arrays = file_of(elements, kinds)
    runs = sorted(run for chunk in chunks(whole(elements), arrays, LIMIT) for run in spans(chunk, arrays))
    assert all(begin % PAGE_BYTES == 0 and end % PAGE_BYTES == 0 for begin, end in runs)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(runs))


@given(counts, st.integers(2, 5))
def test_no_two_replicas_share_a_page(elements, replicas):
    arrays = file_of(elements, EIGHT_BIT)
    own = [shares(count, replicas, GRAIN, first=number) for number, count in enumerate(elements)]
    runs = sorted(
        run
        for replica in range(replicas)
        for chunk in chunks([Part(number, *share[replica]) for number, share in enumerate(own)], arrays, LIMIT)
        for run in spans(chunk, arrays)
    )
    assert all(begin % PAGE_BYTES == 0 and end % PAGE_BYTES == 0 for begin, end in runs)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(runs))


def test_small_parameters_travel_together_in_one_run_a_kind():
    arrays = file_of([5, 7, 9], FP32)
    (chunk,) = chunks(whole([5, 7, 9]), arrays, LIMIT)
    assert chunk == [Part(0, 0, 5), Part(1, 0, 7), Part(2, 0, 9)]
    assert spans(chunk, arrays) == [(0, 12 * PAGE_BYTES)], "and kinds that lie behind one another in one"


def test_a_parameter_is_cut_where_its_smallest_array_ends_a_page():
    arrays = file_of([3 * GRAIN + 1], EIGHT_BIT)
    limit = 2 * (6 * GRAIN + GRAIN // 32)
    assert chunks(whole([3 * GRAIN + 1]), arrays, limit) == [
        [Part(0, 0, 2 * GRAIN)],
        [Part(0, 2 * GRAIN, 3 * GRAIN + 1)],
    ]


def test_what_is_not_on_disk_takes_no_room():
    assert chunks(whole([10 * GRAIN, 3]), [[], []], PAGE_BYTES) == [[Part(0, 0, 10 * GRAIN), Part(1, 0, 3)]]


def test_nothing_to_update_is_no_chunk():
    assert chunks([], [], LIMIT) == []
    assert chunks(whole([0]), [[Array(0, 4)]], LIMIT) == []


def test_a_limit_below_one_grain_is_refused():
    with pytest.raises(ValueError, match="a chunk must hold"):
        chunks(whole([2 * GRAIN]), [[Array(0, 4)]], GRAIN)
