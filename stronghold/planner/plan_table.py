"""The lines of a plan's table that say what its step does, and what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stronghold.planner.plan_lines import section
from stronghold.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stronghold.planner.training_plan import TrainingPlan

WAITS = {
    "fetch": "a fetch",
    "disk": "disk",
    "gradients": "gradient slots",
    "inputs": "inputs on their way down",
    "update": "an update",
    "launch": "a launch",
    "stages": "other stages",
}
"""What the computation waits for, in words."""


def busy_rows(plan: TrainingPlan) -> list[tuple[str, str, str]]:
    """Returns the lines of what works and what is waited for."""
    total_s = plan.step_s.likely
    longest = f"{plan.longest}, {plan.busy_s[plan.longest] / total_s:.0%} of the step"
    waits = [
        ("", f"waiting for {WAITS[cause]}", f"{format_seconds(seconds)} ({seconds / total_s:.0%})")
        for cause, seconds in plan.waits_s.items()
        if seconds > 0.005 * total_s
    ]
    return [("", "longest resource", longest), *waits]


def memory_rows(plan: TrainingPlan) -> list[tuple[str, str, str]]:
    """Returns the lines of what is taken of the memories."""
    device = [
        ("slots", plan.slots_bytes),
        ("gradients", plan.gradient_bytes),
        ("root", plan.root_bytes),
        ("resident", plan.resident_bytes),
        ("root's gradients", plan.root_gradient_bytes),
        ("activations", plan.activation_bytes),
        ("in a step at most", plan.device_bytes),
    ]
    host = [
        ("pinned", plan.pinned_bytes if not plan.is_host else 0),
        ("pageable", plan.pageable_bytes + (plan.pinned_bytes if plan.is_host else 0)),
        ("process", plan.process_bytes),
        ("with the device's" if plan.is_host else "together", plan.host_bytes),
    ]
    return [
        row
        for title, found in (("device", device), ("host", host))
        for row in section(title, {name: format_bytes(size) for name, size in found if size})
    ]
