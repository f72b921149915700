"""What a plan says of a step, beside what was measured of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stronghold.units import format_bytes, format_seconds

CLOSE = 0.15
"""A step that differs from its plan by no more than this share is as planned."""
PARTS = {
    "computing": ("compute_s", "the rates of operators: matmul, attention, elementwise"),
    "waiting for a fetch": ("fetch_wait_s", "the link's: h2d"),
    "waiting for an update": ("update_wait_s", "the time of updates: host_update_ns"),
    "waiting for disk": ("disk_wait_s", "the disk's: read, write"),
}
"""The parts of a step, by what a run calls them, and the numbers of a machine that they follow from."""
MUON = "muon "
_ALIKE = 0.02
"""Steps that differ by no more than this share are alike: nothing is taken upon for the shorter one."""
_SMALL = 0.005
"""A part of no more than this share of the step is not told."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step was planned to take, in seconds by part, and at most in bytes; ``chosen`` and ``reason`` are to read.

    The host's bytes are the whole process's. ``low_s`` and ``high_s`` are by the quartiles of what the machine does.
    The step has so many ``passes``, whose gradients are added up, and each further one would take ``further_s``, by
    part: empty where it is not known.
    """

    chosen: str
    reason: str
    low_s: float
    likely_s: float
    high_s: float
    parts_s: Mapping[str, float]
    device_bytes: int
    host_bytes: int
    passes: int = 1
    further_s: Mapping[str, float] = field(default_factory=dict)

    def of_passes(self, passes: int) -> PlannedStep:
        """Returns what a step of so many takes, where that is known. Bytes are those of the step that was planned."""
        more = max(1, passes) - self.passes
        if not (more and self.further_s):
            return self
        parts_s = {part: seconds + more * self.further_s[part] for part, seconds in self.parts_s.items()}
        longer = 1 + more * sum(self.further_s.values()) / self.likely_s
        return replace(
            self,
            low_s=longer * self.low_s,
            likely_s=longer * self.likely_s,
            high_s=longer * self.high_s,
            parts_s=parts_s,
            passes=passes,
        )

    def rows(
        self,
        measured_s: float,
        parts_s: Mapping[str, float],
        peaks: Mapping[str, int],
        *,
        spread_s: tuple[float, float] | None = None,
    ) -> list[tuple[str, str, str]]:
        """Returns the lines of a table: what was planned beside what was measured, by resource.

        ``peaks`` are the bytes of ``"device"`` and ``"host"``, as far as they are known. Where the step was off, the
        last line says which numbers of the machine are to be measured again.
        """
        off = measured_s / self.likely_s - 1
        between = f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        spread = f" ({' to '.join(map(format_seconds, spread_s))})" if spread_s is not None else ""
        rows = [
            ("step", "planned", f"{format_seconds(self.likely_s)} ({between})"),
            ("", "measured", f"{format_seconds(measured_s)}{spread}, {off:+.0%}"),
        ]
        found = {name: (self.parts_s[part], parts_s[part]) for name, (part, _) in PARTS.items()}
        for name, (planned, measured) in found.items():
            if max(planned, measured) > _SMALL * self.likely_s:
                rows.append(("", name, f"{format_seconds(planned)} planned, {format_seconds(measured)} measured"))
        limits = {"device": self.device_bytes, "host": self.host_bytes}
        for name, peak in peaks.items():
            rows += [
                (f"{name} at most", "planned", format_bytes(limits[name])),
                ("", "measured", f"{format_bytes(peak)}, {peak / limits[name] - 1:+.0%}"),
            ]
        if abs(off) > CLOSE:
            worst = max(found, key=lambda name: abs(found[name][1] - found[name][0]))
            rows.append(("off by", worst, f"measure again {PARTS[worst][1]}: stronghold probe"))
        return rows


class PlannedSteps(dict[str, PlannedStep]):
    """A model's planned step by AdamW's ``update``, or ``MUON`` and Muon's: of one that was planned for, or of more."""

    def of(self, *, in_backward: bool, by_muon: bool = False) -> PlannedStep | None:
        """Returns the one under which the model is trained, as far as it is there."""
        steps = self._of(by_muon) or self
        return steps.get("in_backward" if in_backward else "deferred") or next(iter(steps.values()), None)

    def gain_in_backward(self, *, by_muon: bool = False) -> bool:
        """Whether the step is shorter, by more than a little, where layers are updated in the backward pass."""
        steps = self._of(by_muon)
        if len(steps) < 2:
            return "in_backward" in steps
        return (1 + _ALIKE) * steps["in_backward"].likely_s < steps["deferred"].likely_s

    def _of(self, by_muon: bool) -> Mapping[str, PlannedStep]:
        """Returns the steps of one optimizer by its ``update``."""
        return {name.removeprefix(MUON): step for name, step in self.items() if name.startswith(MUON) == by_muon}
