"""Numbers with units, as people write and read them."""

import re

# Powers of 1000 carry the plain letter, powers of 1024 the "i"; a letter alone means the binary unit, as in
# most tools that take memory sizes (``8G`` is 8 GiB). Case does not matter.
_BYTE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGTP", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(size: str | int) -> int:
    """Returns the bytes that ``size`` names: ``"8GiB"``, ``"500MB"``, ``"1.5 GiB"``, ``"8G"`` (GiB), a count.

    Fractions of a unit are cut to whole bytes. Raises ValueError for anything else: a negative count, an
    unknown unit, less or more than one number, a fraction of the unit "bytes".
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise ValueError(
            f"a size must be a number of bytes or text with a unit (got {size!r}, a {type(size).__name__}); "
            "write 8589934592 or '8GiB'"
        )
    if isinstance(size, int):
        if size < 0:
            raise ValueError(
                f"a size must not be negative (got {size}); pass a number of bytes such as 0 or 8589934592"
            )
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"a size must be one number and one unit (got {size!r}); write '8GiB' or '500MB'")
    number, unit = match.groups()
    scale = _BYTE_UNITS.get(unit.upper())
    if scale is None:
        raise ValueError(
            f"a size's unit must be B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB "
            f"(got {unit!r} in {size!r}); write '8GiB' or '500MB'"
        )
    whole, _, fraction = number.partition(".")
    numerator = int(f"{whole}{fraction}" or "0") * scale  # integers throughout: floats round above 2**53
    bytes_, rest = divmod(numerator, 10 ** len(fraction))
    if rest and scale == 1:
        raise ValueError(f"a size must be a whole number of bytes (got {size!r}); write '8GiB' or '500MB'")
    return bytes_


def format_bytes(count: int) -> str:
    """Returns ``count`` bytes with three significant digits in a binary unit: ``512 B``, ``1.50 GiB``."""
    return _scaled(float(count), 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_unequal(needed: int, limit: int) -> tuple[str, str]:
    """Returns both as :func:`format_bytes` does, or in bytes, ``1,025 bytes`` and ``1,024``, where that is one text."""
    texts = format_bytes(needed), format_bytes(limit)
    return texts if texts[0] != texts[1] else (f"{needed:,} bytes", f"{limit:,}")


def format_seconds(seconds: float) -> str:
    """Returns a duration to read at a glance: ``12.3 µs``, ``7.89 s``, ``2 min 05 s``, ``3 h 07 min``."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds != seconds or seconds == float("inf"):
        return f"{seconds} s"
    if seconds == 0:
        return "0 s"
    if seconds < 59.95:  # what rounds to 60.0 s is a minute
        for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
            value = seconds / scale
            if value < 999.5 or unit == "s":
                return f"{_three_digits(value)} {unit}"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds < 86_400 - 30:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"


def format_count(count: int) -> str:
    """Returns a count as the field writes model sizes: ``768``, ``51.2 k``, ``43.1 M``, ``1.717 B``.

    Billions and trillions keep a third decimal, by which model sizes are told apart; trailing zeros go.
    """
    if count < 0:
        return f"-{format_count(-count)}"
    if count < 1000:
        return str(count)
    for unit, scale, decimals, limit in (("k", 10**3, 1, 999_950), ("M", 10**6, 1, 999_950_000)):
        if count < limit:
            return f"{_trimmed(count / scale, decimals)} {unit}"
    if count < 999_999_500_000:
        return f"{_trimmed(count / 10**9, 3)} B"
    return f"{_trimmed(count / 10**12, 3)} T"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    if value < 0:
        return f"-{_scaled(-value, base, units)}"
    for index, unit in enumerate(units):
        # what would round to "1024" is 1.00 of the next unit
        if value < base - 0.5 or unit == units[-1]:
            text = f"{value:.0f}" if index == 0 else _three_digits(value)
            return f"{text} {unit}"
        value /= base
    raise AssertionError("the last unit takes everything")


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _trimmed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")
