"""What else was looked at for a plan: settings that fit, that do not, and processes that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stronghold.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Other settings that fit, with the seconds of a step and the bytes on the device and in host memory."""

    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    step_s: float
    device_bytes: int
    host_bytes: int
    parallel: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Settings that may be faster and do not fit: ``place`` would have to have ``needed_bytes`` of ``limit_bytes``."""

    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    place: str
    needed_bytes: int
    limit_bytes: int
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def lacks(self) -> str:
        """Returns what would have to be there and what is, or how much is lacking where that reads the same."""
        needed, limit = format_bytes(self.needed_bytes), format_bytes(self.limit_bytes)
        if needed == limit:
            return f"lacks {format_bytes(self.needed_bytes - self.limit_bytes)} of {limit}"
        return f"needs {needed}, has {limit}"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Stages and replicas that the processes could be, and why they cannot train the model."""

    stages: int
    replicas: int
    reason: str
