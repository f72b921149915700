"""A plan over operators with its prediction, as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage
from stronghold.planner.profiled.predict import Prediction, StagePrediction
from stronghold.planner.profiled.profile import Profile
from stronghold.planner.profiled.reach import Cluster
from stronghold.tables import Shown
from stronghold.units import format_bytes, format_seconds

NAMED = 3
"""Recomputed operators of a stage that the table names."""


@dataclass(frozen=True, kw_only=True)
class PlannedOperators(Shown):
    """A plan from a profile, and what it takes; ``str()`` of it is a table to read."""

    title = "plan"

    profile: Profile
    cluster: Cluster
    plan: OperatorPlan
    prediction: Prediction
    memory_bytes: int

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""
        plan, cluster = self.plan, self.cluster
        rows = [
            ("model", plan.model, f"{len(self.profile.operators)} operators, as profiled"),
            (
                "machine",
                f"{cluster.devices} device{'s' if cluster.devices > 1 else ''}",
                f"{cluster.nodes} x {cluster.devices_per_node}, {format_bytes(self.memory_bytes)} each",
            ),
            ("step", "time", f"{self.prediction.step_s:.4g} s, by the profile"),
            ("", "speed", f"{plan.batch / self.prediction.step_s:.4g} samples/s, {plan.batch} samples a step"),
            ("", "micro-batches", f"{plan.micro_batches} of {plan.micro_batch} samples"),
        ]
        longest = max(one.micro_batch_s for one in self.prediction.stages)
        for number, (stage, takes) in enumerate(zip(plan.stages, self.prediction.stages, strict=True)):
            rows += self._stage_rows(number, stage, takes, longest)
        rows.append(("to run", "tensor parallel", self.executed()))
        return rows

    def executed(self) -> str:
        """Returns what of the plan this library does not execute."""
        numbers = [n for n, stage in enumerate(self.plan.stages) if any(one.degree > 1 for one in stage.choices)]
        if not numbers:
            return "no operator is split; the file has the keys of Aceso's plans"
        which = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        return f"not executed by stronghold, and {which} need it; the file has the keys of Aceso's plans"

    def _stage_rows(
        self, number: int, stage: OperatorStage, takes: StagePrediction, longest: float
    ) -> list[tuple[str, str, str]]:
        names = self.profile.operators[stage.begin : stage.end]
        shared = Counter(f"degree {one.degree} x {one.replicas} replicas" for one in stage.choices)
        ways = [way if len(shared) == 1 else f"{way} ({count} operators)" for way, count in shared.most_common()]
        again = Counter(name for name, one in zip(names, stage.recomputed, strict=True) if one)
        recomputed = "none"
        if again:
            told = [f"{count} x {name}" for name, count in again.most_common(NAMED)]
            more = ["…"] if len(again) > NAMED else []
            recomputed = f"{sum(again.values())} operators: {', '.join(told + more)}"
        is_longest = ", the longest" if takes.micro_batch_s == longest and len(self.plan.stages) > 1 else ""
        time = f"{format_seconds(takes.micro_batch_s)} a micro-batch{is_longest}"
        held = f"{format_bytes(round(takes.device_bytes))} on each"
        devices = f"{stage.devices} device{'s' if stage.devices > 1 else ''}"
        return [
            (f"stage {number}", f"{devices}, {len(names)} operators", f"{', '.join(ways)}; {time}; {held}"),
            ("", "recomputed", recomputed),
        ]
