"""Causes that are known and not mended yet: programs may fail by them. Each entry names what it waits for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.programs import Program
from tests.fuzz.running import Failure


@dataclass(frozen=True)
class Cause:
    """A cause of failures: their kind, the place that raised, and what a program must have for it."""

    name: str
    kind: str
    place: str = ""
    labels: frozenset[str] = frozenset()

    def explains(self, failure: Failure, program: Program) -> bool:
        alike = re.fullmatch(self.kind, failure.kind) and re.fullmatch(self.place or ".*", failure.place)
        return bool(alike) and self.labels <= program.labels()


KNOWN: tuple[Cause, ...] = ()
