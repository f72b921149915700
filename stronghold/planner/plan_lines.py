"""How the table of a plan says what it says: sections, settings, and times that people wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stronghold.planner.partition_file import partition_of
from stronghold.units import format_bytes, format_seconds, parse_bytes

BUDGETS = ("device_memory", "host_memory")
"""Settings that follow from the others, in bytes."""


def duration(seconds: float) -> str:
    """Returns a time that people wait for: in days, hours or minutes."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return format_seconds(seconds)


def section(title: str, lines: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(title if not number else "", name, value) for number, (name, value) in enumerate(lines.items())]


def shown(name: str, value: Any) -> str:
    return format_bytes(parse_bytes(value)) if name in BUDGETS and value is not None else repr(value)


def stages_shown(balance: Sequence[int] | Mapping[str, Any]) -> str:
    """Returns the layers of each stage, and how many of them keep their activations where some do."""
    if not isinstance(balance, Mapping):
        return f"{','.join(map(str, balance))} layers"
    file = partition_of(balance)
    kept = (layers - again for layers, again in zip(file.partition, file.recomputed, strict=True))
    return f"{stages_shown(file.partition)}, of which {','.join(map(str, kept))} keep their activations"
