"""How tensors lie in one flat buffer."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stronghold.layout import ALIGNMENT_BYTES, lay_out, shares

sizes = st.lists(st.integers(0, 1000), max_size=12)


def test_the_example_of_the_docstring():
    layout = lay_out([100, 4])
    assert layout.offsets == (0, 128)
    assert layout.sizes == (100, 4)
    assert layout.total_bytes == 132


def test_nothing_takes_nothing():
    assert lay_out([]).total_bytes == 0
    assert list(lay_out([]).runs([])) == []
    assert list(lay_out([5, 5]).runs([])) == []


def test_neighbours_are_one_run_and_the_padding_between_goes_along():
    layout = lay_out([100, 4, 64, 1])
    assert layout.offsets == (0, 128, 192, 256)
    assert list(layout.runs([0, 1, 2, 3])) == [(0, 257)]
    assert list(layout.runs([0, 2, 3])) == [(0, 100), (192, 65)]
    assert list(layout.runs([1])) == [(128, 4)]


@given(sizes)
def test_tensors_are_aligned_in_order_and_overlap_nowhere(sizes):
    layout = lay_out(sizes)
    end = 0
    for offset, size, wanted in zip(layout.offsets, layout.sizes, sizes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        assert size == wanted
        end = offset + size
    assert layout.total_bytes == end


@given(sizes, st.data())
def test_runs_carry_what_is_wanted_and_no_other_tensor(sizes, data):
    wanted = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else [])
    layout = lay_out(sizes)
    runs = list(layout.runs(wanted))
    carried = {byte for begin, length in runs for byte in range(begin, begin + length)}
    for number, (offset, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
        own = set(range(offset, offset + size))
        assert own <= carried if number in wanted else not own & carried
    gaps = sum(one + 1 != other for one, other in pairwise(wanted))
    assert len(runs) == (gaps + 1 if wanted else 0)


@given(sizes, st.integers(1, 4))
def test_a_layout_scales_with_the_item_size_up_to_the_padding(sizes, item):
    small, large = lay_out(sizes), lay_out([size * item for size in sizes])
    assert large.total_bytes >= small.total_bytes
    assert large.total_bytes <= small.total_bytes * item + ALIGNMENT_BYTES * len(sizes)


def test_the_example_of_shares():
    assert shares(10, 2, 4) == [(0, 8), (8, 10)]
    assert shares(10, 2, 4, first=1) == [(0, 4), (4, 10)]


@given(st.integers(0, 5000), st.integers(1, 7), st.sampled_from([1, 64]), st.integers(0, 20))
def test_shares_hold_every_element_once_and_differ_by_a_grain(elements, count, grain, first):
    found = shares(elements, count, grain, first)
    assert [begin for begin, _ in found] + [elements] == [0] + [end for _, end in found]
    assert all(begin % grain == 0 or begin == elements for begin, _ in found)
    grains = [-(-(end - begin) // grain) for begin, end in found]
    assert max(grains) - min(grains) <= 1
    if grains.count(max(grains)) < count:
        assert grains[first % count] == max(grains)
