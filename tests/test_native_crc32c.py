"""Checksums: each way that this processor has, against the definition; the standard's numbers are in native_disk/."""

import pytest
import torch

from stronghold import _C
from stronghold.native import SUM_BYTES
from tests.test_native_disk import numbers

WAYS = _C.crc32c_ways()


def crc32c(data: torch.Tensor, way: str, crc: int = 0) -> int:
    return _C.crc32c(data.data_ptr(), data.nbytes, crc, way)


def by_definition(data: bytes, crc: int = 0) -> int:
    """The remainder bit by bit, of a polynomial whose bits are in reverse."""
    register = crc ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_the_slowest_way_is_there_on_any_processor_and_others_are_refused():
    assert WAYS[0] == "table"
    with pytest.raises(ValueError, match=f"got 'none', the best is {WAYS[-1]}"):
        _C.crc32c(0, 0, 0, "none")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 512, 769, 4095, 4096, 4104, 12287, 12288, 12555])
def test_every_length_at_every_offset_behind_what_came_before(way, length):
    data = numbers(length + 64)
    for offset in (0, 1, 8, 63):
        part = data[offset : offset + length]
        first = length // 3
        expected = by_definition(bytes(part.tolist()))
        assert crc32c(part, way) == expected
        assert crc32c(part[first:], way, crc=crc32c(part[:first], way)) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 1, 4096, 2 * 4096 + 5, 3 * 4096, 7 * 4096, 7 * 4096 + 1])
def test_each_page_has_its_own(way, length):
    data = numbers(length)
    parts = [data[begin : begin + SUM_BYTES] for begin in range(0, length, SUM_BYTES)]
    sums = torch.full((len(parts) + 1,), 7, dtype=torch.int64).to(torch.uint32)
    _C.crc32c_of_pages(data.data_ptr(), length, sums.data_ptr(), way)
    assert sums.tolist() == [*(crc32c(part, "table") for part in parts), 7]


@pytest.mark.parametrize("way", WAYS)
def test_every_bit_counts(way):
    data = numbers(512)
    found = {crc32c(data, way)}
    for bit in range(8 * 512):
        data[bit // 8] ^= 1 << bit % 8
        found.add(crc32c(data, way))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * 512 + 1
