"""Settles what ``offload`` leaves open: the settings, the cut of a mixture's experts, the place of each parameter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Device
from stronghold.engine.experts_that_fit import Fit, cut_as_asked
from stronghold.engine.placement import Placement, plan
from stronghold.engine.reopening import kept_on_disk
from stronghold.engine.split_experts import split_experts
from stronghold.planned import PlannedSteps
from stronghold.planner.training_plan import TrainingPlan
from stronghold.settings import OffloadSettings
from stronghold.unit import Replicas


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What was settled; ``planned`` is what was planned for, where a step was."""

    settings: OffloadSettings
    planned: PlannedSteps | None
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What ``offload`` is asked, in its words, but for the model. ``reopen`` tells that the store has the weights."""

    settings: OffloadSettings
    device: Device
    dtype: torch.dtype | None
    layers: str | Sequence[str] | None
    experts_per_part: int | str | None
    replicas: Replicas
    shared: Sequence[nn.Parameter]
    reopen: bool
    inputs: Tensor | Mapping[str, Any] | Sequence[Any] | None
    plan: TrainingPlan | str | os.PathLike[str] | None

    def arrange(self, model: nn.Module) -> Arrangement:
        """Settles it for ``model``, of which nothing changes but that its experts are cut apart.

        Raises ValueError and BudgetError, before anything has changed.
        """
        asked = self if self.plan is None else self._as_planned(self.plan)
        return asked._arrange(model)

    def _as_planned(self, plan: TrainingPlan | str | os.PathLike[str]) -> Asked:
        """Returns the same with the experts of a part that the plan is for."""
        plan = plan if isinstance(plan, TrainingPlan) else TrainingPlan.read(plan)
        asked, planned = self.experts_per_part, plan.experts_per_part
        if asked not in (None, "auto", planned):
            raise ValueError(
                f"a plan holds for its own settings (got experts_per_part={asked!r} beside one with {planned!r}); "
                "leave out experts_per_part, or plan with it"
            )
        return replace(self, plan=plan, experts_per_part=planned)

    def _arrange(self, model: nn.Module) -> Arrangement:
        cut, best = cut_as_asked(model, self.experts_per_part, lambda one: self._fit(one, model))
        settings, planned = best.found
        if cut is not None:
            split_experts(model, cut)
        return Arrangement(settings=settings, planned=planned, placement=self._placed(model, settings))

    def _settled(self, model: nn.Module, whole: nn.Module) -> tuple[OffloadSettings, PlannedSteps | None]:
        if self.inputs is None and self.plan is None:
            return self.settings, None
        # Here, since what it imports takes a second that training does without.
        from stronghold.engine.planning.auto import settled

        return settled(
            model,
            self.settings,
            self.device,
            inputs=self.inputs,
            plan=self.plan,
            layers=self.layers,
            dtype=self.dtype,
            in_memory=whole,
        )

    def _placed(self, model: nn.Module, settings: OffloadSettings) -> Placement:
        settings.check_known()
        on_host = [*self.shared, *(kept_on_disk(model, settings.directories[0]) if self.reopen else ())]
        return plan(model, self.layers, self.dtype, settings, self.device, self.replicas, on_host)

    def _fit(self, model: nn.Module, whole: nn.Module) -> Fit:
        settings, planned = self._settled(model, whole)
        if self.experts_per_part != "auto":
            # A cut is placed without its experts' values first, so that an error leaves the model whole.
            if model is not whole:
                self._placed(model, settings)
            return Fit(0.0, (settings, planned))
        free = self.device.free_bytes() if settings.device_memory is None else None
        limited = settings if free is None else replace(settings, device_memory=free)
        window = self._placed(model, limited).window
        # Without a plan a second slot is better than one, for it hides fetches; more of them are not.
        cost = 1 / min(max(1, window), 2) if planned is None else min(step.likely_s for step in planned.values())
        return Fit(cost, (settings, planned))
