"""What is taken of a file never overlaps, and gaps are used again: compared with a file of single bytes."""

from hypothesis import given
from hypothesis import strategies as st

from stronghold.store.extents import Extents


def test_what_is_given_back_is_taken_again():
    extents = Extents()
    assert [extents.take(length) for length in (3, 2, 4)] == [0, 3, 5]
    extents.give_back(0, 3)
    extents.give_back(3, 2)
    assert (extents.take(4), extents.take(2), extents.end_bytes) == (0, 9, 11)
    assert (extents.place_of(1), extents.take(1), extents.place_of(1)) == (4, 4, 11)


def test_what_is_given_back_at_the_end_makes_it_shorter():
    extents = Extents()
    taken = [(extents.take(length), length) for length in (1, 2, 3)]
    for begin, length in (taken[0], taken[1], taken[2]):
        extents.give_back(begin, length)
    assert (extents.end_bytes, extents.take(5)) == (0, 0)


@given(st.lists(st.one_of(st.integers(0, 9), st.just(None)), max_size=40), st.randoms())
def test_against_a_file_of_single_bytes(lengths, random):
    extents, taken = Extents(), []
    file: list[int | None] = []
    """Who has each byte."""
    for number, length in enumerate(lengths):
        if length is None:
            if taken:
                begin, count, who = taken.pop(random.randrange(len(taken)))
                assert file[begin : begin + count] == [who] * count
                file[begin : begin + count] = [None] * count
                extents.give_back(begin, count)
        else:
            free = next((i for i in range(len(file)) if file[i : i + length] == [None] * length and length), len(file))
            foreseen, begin = extents.place_of(length), extents.take(length)
            assert foreseen == begin and (not length or begin == free)
            if length:
                file[begin : begin + length] = [number] * length
                taken.append((begin, length, number))
        while file and file[-1] is None:
            file.pop()
        assert extents.end_bytes == len(file)
