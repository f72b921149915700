"""Looks for failing programs by hypothesis, round after round, and sorts what it finds by cause."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.known import Cause
from tests.fuzz.minimise import minimise
from tests.fuzz.programs import Program, programs
from tests.fuzz.running import Failure, run

ROUND = 400
"""Programs in a round; each begins with simple ones."""


class Enough(BaseException):
    """The time is over."""


@dataclass(frozen=True)
class Found:
    """A cause, and the smallest program that was found for it."""

    cause: Cause
    failure: Failure
    program: Program


def cause_of(failure: Failure, program: Program) -> Cause:
    """Returns what a failure of a minimal program says of its cause: a raw error's is where it was raised."""
    kind, place = re.escape(failure.kind), re.escape(failure.place)
    labels = frozenset() if " " not in failure.kind else program.labels() - {"Train"}
    return Cause(name=failure.kind, kind=kind, place=place, labels=labels)


class Hunt:
    """Runs programs for so many seconds; minimises each cause for at most ``minimise_s``.

    ``tell`` is called behind each program, ``tell_found`` with each new cause; the program under way is in ``file``.
    ``count`` counts programs, ``counts`` the failures of each cause.
    """

    def __init__(
        self,
        *,
        operations: int,
        minimise_s: float,
        known: Sequence[Cause],
        tell: Callable[[Hunt], None],
        tell_found: Callable[[Found], None],
        file: Path,
    ) -> None:
        self.operations = operations
        self.minimise_s = minimise_s
        self.known = known
        self.tell = tell
        self.tell_found = tell_found
        self.file = file
        self.count = 0
        self.counts: Counter[Cause] = Counter()
        self.found: list[Found] = []
        self.underway: Program | None = None
        self._until = 0.0

    def run(self, seconds: float, first_seed: int) -> None:
        self._until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < self._until:
            with suppress(Enough):
                self._round(first_seed + number)
            number += 1

    def _round(self, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=ROUND,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(programs(self.operations))
        def one(program: Program) -> None:
            if time.monotonic() > self._until:
                raise Enough
            self._one(program)

        one()

    def _one(self, program: Program) -> None:
        failure = self._run(program)
        self.count += 1
        self.tell(self)
        if failure is None:
            return
        for cause in (*self.known, *(found.cause for found in self.found)):
            if cause.explains(failure, program):
                self.counts[cause] += 1
                return
        smallest = minimise(program, lambda smaller: self._fails_alike(smaller, failure), self.minimise_s)
        failure = self._run(smallest) or failure  # a rare one may not come again
        found = Found(cause_of(failure, smallest), failure, smallest)
        self.found.append(found)
        self.counts[found.cause] += 1
        self.tell_found(found)

    def _fails_alike(self, program: Program, like: Failure) -> bool:
        failure = self._run(program)
        if failure is None or (failure.kind, failure.place) != (like.kind, like.place):
            return False
        return not any(cause.explains(failure, program) for cause in self.known)

    def _run(self, program: Program) -> Failure | None:
        self.underway = program
        self.file.write_text(f"from tests.fuzz.short import *\ncheck({program!r})\n")
        failure = run(program)
        self.underway = None
        return failure


class Watchdog:
    """Calls ``hung`` from a thread of its own when a program takes longer than ``seconds``."""

    def __init__(self, hunt: Hunt, seconds: float, hung: Callable[[Program], None]) -> None:
        self._hunt, self._seconds, self._hung = hunt, seconds, hung
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        since, last = time.monotonic(), None
        while True:
            time.sleep(1)
            if (now := self._hunt.underway) is None or now is not last:
                since, last = time.monotonic(), now
            elif time.monotonic() - since > self._seconds:
                self._hung(now)
                return
