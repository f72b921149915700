"""A plan for a mixture whose experts may be cut apart: ``plan(experts_per_part=)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import nn

from stronghold.engine.experts_that_fit import Fit, cut_as_asked
from stronghold.planner.other_plans import Alternative, Refused
from stronghold.planner.training_plan import TrainingPlan

_Other = TypeVar("_Other", Alternative, Refused)


def plan_in_parts(
    model: nn.Module, experts_per_part: int | str | None, plan: Callable[[nn.Module], TrainingPlan]
) -> TrainingPlan:
    """Returns the plan of ``model`` in parts of so many experts, of which its settings tell: None for whole layers.

    ``"auto"`` is for whole layers where ``plan`` has settings for them, else for the parts whose step is the shortest.
    The model is not changed. Raises BudgetError where nothing fits, and ValueError for a model without experts that can
    be cut apart, or a number that is none.
    """

    def fit(one: nn.Module) -> Fit:
        found = plan(one)
        return Fit(found.step_s.likely, found)

    number, fits = cut_as_asked(model, experts_per_part, fit)
    found: TrainingPlan = fits.found
    if number is None:
        return found

    def told(others: Sequence[_Other]) -> list[_Other]:
        return [replace(one, settings={**one.settings, "experts_per_part": number}) for one in others]

    settings = {**found.settings, "experts_per_part": number}
    return replace(found, settings=settings, others=told(found.others), refused=told(found.refused))
