"""What a traced step comes to: how busy the device was, what copies hid under, and why nothing ran where nothing did.

Pure: numbers in, numbers out. Times are seconds of one clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Interval = tuple[float, float]
LAUNCHED_S = 2e-6
"""A kernel launched this much before a gap began did not make the device wait for its launch."""
NO_OPERATION = "host: Python, in no operation of PyTorch"


class Work(NamedTuple):
    """A kernel: ``issued_s`` is when ``thread`` launched it, None where the launch is not known."""

    name: str
    begin_s: float
    end_s: float
    issued_s: float | None = None
    thread: object = None


class Copy(NamedTuple):
    """A copy between host and device, ``way`` "up" or "down"; 0 bytes where nobody counts them."""

    way: str
    bytes: int
    begin_s: float
    end_s: float


class Call(NamedTuple):
    """What a thread of the host was at."""

    name: str
    begin_s: float
    end_s: float
    thread: object = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One traced step. ``kernels`` are those of all streams, ``compute`` of the computation's, by their beginning.

    ``waits`` are the engine's, by name, when the host issued them; ``host`` whatever else the host was at.
    """

    begin_s: float
    end_s: float
    kernels: Sequence[Work]
    compute: Sequence[Work]
    copies: Sequence[Copy] = ()
    waits: Sequence[Call] = ()
    host: Sequence[Call] = ()


class Gap(NamedTuple):
    """A time in which the computation's stream was at nothing, between two kernels, and ``why``."""

    begin_s: float
    end_s: float
    before: str
    after: str
    why: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """Returns when at least one of ``spans`` was, as intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length_s(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in spans)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns when both of two lists were, each as :func:`merged` returns it."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def outermost(calls: Sequence[Call]) -> list[Call]:
    """Returns those of one thread's ``calls`` that are within no other, in the order of their beginning."""
    found: list[Call] = []
    for call in sorted(calls, key=lambda call: (call.begin_s, -call.end_s)):
        if not found or call.begin_s >= found[-1].end_s:
            found.append(call)
    return found


def gaps_of(step: Step, least_s: float = 1e-6) -> list[Gap]:
    """Returns when no kernel of the computation's stream ran for ``least_s`` or longer, in order."""
    found: list[Gap] = []
    waits, host = UnderWay(step.waits), UnderWay(step.host)
    before = Work("the step's beginning", step.begin_s, step.begin_s)
    for after in [*step.compute, Work("the step's end", step.end_s, step.end_s)]:
        if after.begin_s - before.end_s >= least_s:
            why = _late(waits, before, after) or _reason(waits, host, before, after)
            found.append(Gap(before.end_s, after.begin_s, before.name, after.name, why))
        if after.end_s > before.end_s:
            before = after
    return found


class UnderWay:
    """Calls in the order of their beginning, asked for what was under way at times that only go on."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = sorted(calls, key=lambda call: call.begin_s)
        self._begins = [call.begin_s for call in self._calls]
        self._next = 0
        self._active: list[Call] = []

    def between(self, begin_s: float, end_s: float) -> list[Call]:
        """Returns those that were under way at some time from ``begin_s`` to ``end_s``."""
        while self._next < len(self._calls) and self._begins[self._next] < end_s:
            self._active.append(self._calls[self._next])
            self._next += 1
        self._active = [call for call in self._active if call.end_s > begin_s]
        return self._active

    def begun(self, begin_s: float, end_s: float) -> list[Call]:
        """Returns those that began from ``begin_s`` to ``end_s``, whatever the times asked for before."""
        return self._calls[bisect_left(self._begins, begin_s) : bisect_right(self._begins, end_s)]


def _late(waits: UnderWay, before: Work, after: Work) -> str:
    """Returns why a kernel that had been launched before the gap began later; nothing where it had not been.

    Its stream waited: for what the waits say that were issued between the two launches.
    """
    if after.issued_s is None or after.issued_s >= before.end_s - LAUNCHED_S:
        return ""
    since_s = before.begin_s if before.issued_s is None else before.issued_s
    names = dict.fromkeys(call.name for call in waits.begun(since_s, after.issued_s))
    return f"device: {', '.join(names)}" if names else "device: between two kernels that were launched"


def _reason(waits: UnderWay, host: UnderWay, before: Work, after: Work) -> str:
    """Returns what the host was at for half of the gap at least: one of its waits, or its innermost call."""
    begin_s, end_s = before.end_s, after.begin_s
    least_s = (end_s - begin_s) / 2
    for call in waits.between(begin_s, end_s):
        if _shared(call, begin_s, end_s) >= least_s:
            return f"host: {call.name}"
    busy = [call for call in host.between(begin_s, end_s) if after.thread is None or call.thread == after.thread]
    covering = [call for call in busy if _shared(call, begin_s, end_s) >= least_s]
    if covering:
        return f"host: {min(covering, key=lambda call: call.end_s - call.begin_s).name}"
    return NO_OPERATION


def _shared(call: Call, begin_s: float, end_s: float) -> float:
    return max(0.0, min(call.end_s, end_s) - max(call.begin_s, begin_s))


def summary(step: Step, largest: int = 10) -> dict[str, Any]:
    """Returns what a step comes to, as a record holds it: shares of the step, and the ``largest`` gaps.

    ``hidden`` is the share of the time in which something was copied that is under a kernel, or None without copies;
    ``why_s`` the seconds of all gaps by their reasons, the longest first.
    """
    whole_s = step.end_s - step.begin_s
    busy = merged((work.begin_s, work.end_s) for work in step.kernels)
    copied = merged((copy.begin_s, copy.end_s) for copy in step.copies)
    gaps = gaps_of(step)
    why_s: dict[str, float] = {}
    for gap in gaps:
        why_s[gap.why] = why_s.get(gap.why, 0.0) + gap.length_s
    ways = {way: _moved([copy for copy in step.copies if copy.way == way]) for way in ("up", "down")}
    return {
        "traced_s": whole_s,
        "busy": length_s(busy) / whole_s,
        "kernels": len(step.kernels),
        "hidden": length_s(common(busy, copied)) / length_s(copied) if copied else None,
        "copies": {way: moved for way, moved in ways.items() if moved},
        "why_s": dict(sorted(why_s.items(), key=lambda item: -item[1])),
        "gaps": [
            {"at_s": gap.begin_s - step.begin_s, "length_s": gap.length_s, **_names(gap)}
            for gap in sorted(gaps, key=lambda gap: -gap.length_s)[:largest]
        ],
    }


def _moved(copies: Sequence[Copy]) -> dict[str, float]:
    if not copies:
        return {}
    time_s = length_s(merged((copy.begin_s, copy.end_s) for copy in copies))
    moved = sum(copy.bytes for copy in copies)
    return {"bytes": moved, "copying_s": time_s, "gb_per_s": moved / time_s / 1e9 if time_s else 0.0}


def _names(gap: Gap) -> dict[str, str]:
    return {"before": gap.before, "after": gap.after, "why": gap.why}
