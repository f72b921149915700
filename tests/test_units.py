import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.units import format_bytes, format_count, format_seconds, format_unequal, parse_bytes


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (123, 123),
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1kB", 1000),
        ("8GiB", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("  1.5 GiB ", 3 * 2**29),
        (".5K", 512),
        ("2.TB", 2 * 10**12),
        ("0.1GB", 100_000_000),  # not a neighbour of it, as in floats
        ("9007199254740993", 2**53 + 1),
        ("1PiB", 2**50),
        ("0.3KiB", 307),  # cut to whole bytes
    ],
)
def test_sizes_are_read(size, count):
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-1, r"must not be negative \(got -1\)"),
        ("-1GiB", r"one number and one unit \(got '-1GiB'\)"),
        ("", r"one number and one unit \(got ''\)"),
        ("GiB", "one number and one unit"),
        ("8 GiB 3", "one number and one unit"),
        ("1.2.3GB", "one number and one unit"),
        ("1e9", "one number and one unit"),
        ("nan", "one number and one unit"),
        ("٣GB", "one number and one unit"),
        ("8 XB", r"unit must be B, KB, .* \(got 'XB' in '8 XB'\)"),
        ("8Gb/s", "one number and one unit"),
        ("1.5", r"whole number of bytes \(got '1.5'\)"),
        ("1.5B", "whole number of bytes"),
        (1.5, r"a number of bytes or text with a unit \(got 1.5, a float\)"),
        (True, "a number of bytes or text"),
        (None, "a number of bytes or text"),
    ],
)
def test_what_is_not_a_size_is_refused(size, message):
    with pytest.raises(ValueError, match=message):
        parse_bytes(size)


@given(st.integers(0, 2**60))
def test_a_count_reads_as_itself(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (139 * 2**30, "139 GiB"),
        (5 * 2**60, "5120 PiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_bytes_are_written(count, text):
    assert format_bytes(count) == text


def test_what_is_needed_reads_otherwise_than_what_there_is():
    assert format_unequal(2 * 2**20, 2**20) == ("2.00 MiB", "1.00 MiB")
    assert format_unequal(2**20 + 1, 2**20) == ("1,048,577 bytes", "1,048,576")


@given(st.integers(0, 2**55))
def test_written_bytes_read_back_within_their_three_digits(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-9, "5.00 ns"),
        (12.34e-6, "12.3 µs"),
        (4.56e-3, "4.56 ms"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (7.891, "7.89 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125.2, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (11_220, "3 h 07 min"),
        (86_399, "1 d 00 h"),
        (200_000, "2 d 08 h"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_seconds_are_written(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (51_200, "51.2 k"),
        (999_999, "1 M"),
        (43_100_000, "43.1 M"),
        (999_960_000, "1 B"),
        (1_717_000_000, "1.717 B"),
        (5_141_000_000, "5.141 B"),
        (1_200_000_000_000, "1.2 T"),
        (-51_200, "-51.2 k"),
    ],
)
def test_counts_are_written(count, text):
    assert format_count(count) == text
