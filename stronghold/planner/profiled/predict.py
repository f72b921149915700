"""What a plan over operators takes: a step's seconds and each device's bytes, as Aceso's performance model has them.

The model is that of Liu et al., "Aceso" (EuroSys 2024), section 4 and its artifact. A micro-batch takes a stage the
sum of its operators' times, of what it recomputes, of the collectives that change layouts, and of the messages that
come and go. A step of 1F1B takes each stage once, which fills and drains the pipeline, and the longest one for every
further micro-batch. What gradients take on their way between replicas is not in it. One thing is read differently: the
artifact looks up a stage's last output by the degree of its first operator, this by that of its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stronghold.planner.profiled.layouts import Share, reshard
from stronghold.planner.profiled.operator_plan import OperatorPlan, OperatorStage
from stronghold.planner.profiled.profile import Costs, Profile


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One stage's seconds for one micro-batch, and the bytes of each of its devices."""

    forward_s: float
    backward_s: float
    recompute_s: float
    reshard_s: float
    receive_s: float
    send_s: float
    state_bytes: float
    """Weights, gradients, masters and moments."""
    activation_bytes: float
    """Of the micro-batches under way, and of the one whose backward pass recomputes."""
    reserved_bytes: float

    @property
    def micro_batch_s(self) -> float:
        busy = self.forward_s + self.backward_s + self.recompute_s
        return busy + self.reshard_s + self.receive_s + self.send_s

    @property
    def device_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes + self.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's stages, and the seconds of a step."""

    stages: Sequence[StagePrediction]
    step_s: float

    @property
    def device_bytes(self) -> float:
        """What the fullest device holds."""
        return max(stage.device_bytes for stage in self.stages)


def pipeline_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Returns the seconds of a step of 1F1B, of the stages' seconds for one micro-batch."""
    return sum(stages_s) + (micro_batches - 1) * max(stages_s)


def predict(profile: Profile, plan: OperatorPlan, devices_per_node: int) -> Prediction:
    """Returns what ``plan`` takes on nodes of so many devices.

    Raises ValueError for a plan of another number of operators, or with something that was not profiled.
    """
    if plan.stages[-1].end != len(profile.operators):
        raise ValueError(
            f"a plan must have the operators of the profile (got {plan.stages[-1].end}, {profile.model} has "
            f"{len(profile.operators)}); pass the profile and the layers that it was made for"
        )
    stages, before = [], 0
    for number, stage in enumerate(plan.stages):
        after = before + stage.devices
        stages.append(
            predict_stage(
                profile,
                stage,
                plan.micro_batch,
                behind=len(plan.stages) - 1 - number,
                receives_across=before > 0 and before % devices_per_node == 0,
                sends_across=after % devices_per_node == 0,
            )
        )
        before = after
    return Prediction(stages=stages, step_s=pipeline_s([one.micro_batch_s for one in stages], plan.micro_batches))


def predict_stage(
    profile: Profile,
    stage: OperatorStage,
    micro_batch: int,
    *,
    behind: int,
    receives_across: bool,
    sends_across: bool,
) -> StagePrediction:
    """Returns what one stage takes, with so many stages behind it, each of which has a micro-batch under way."""
    names = profile.operators[stage.begin : stage.end]
    costs = stage_costs(profile, stage.begin, stage.choices, micro_batch)
    links = profile.links
    saved, peak = recomputed_bytes(profile, names, costs, stage.recomputed)
    held = costs[0].input_bytes + sum(held_bytes(profile, names, costs)) - saved
    weights = sum(one.weight_bytes for one in costs)
    forward = max((one.reserved_forward_bytes for one in costs[:-1]), default=0.0)
    backward = max((one.reserved_backward_bytes for one in costs[:-1]), default=0.0)
    return StagePrediction(
        forward_s=sum(one.forward_s for one in costs),
        backward_s=sum(one.backward_s for one in costs),
        recompute_s=sum(one.forward_s for one, again in zip(costs, stage.recomputed, strict=True) if again),
        reshard_s=sum(reshard_times(profile, names, costs, stage.choices)),
        receive_s=links.send_s(costs[0].input_bytes, across=receives_across),
        send_s=links.send_s(costs[-1].output_bytes, across=sends_across),
        state_bytes=weights * profile.family.copies,
        activation_bytes=held * (behind + 1) + peak,
        reserved_bytes=max(forward + backward, weights),
    )


def stage_costs(profile: Profile, begin: int, choices: Sequence[Share], micro_batch: int) -> list[Costs]:
    """Returns the costs of a stage's operators. Raises ValueError for what was not profiled."""
    tables = {choice: profile.costs_of(micro_batch, choice) for choice in set(choices)}
    return [tables[choice][profile.rows[begin + number]] for number, choice in enumerate(choices)]


def held_bytes(profile: Profile, names: Sequence[str], costs: Sequence[Costs]) -> list[float]:
    """Returns what each operator holds for its backward pass."""
    share = profile.family.share
    return [share(name) * one.activation_bytes for name, one in zip(names, costs, strict=True)]


def recomputed_bytes(
    profile: Profile, names: Sequence[str], costs: Sequence[Costs], recomputed: Sequence[bool]
) -> tuple[float, float]:
    """Returns what recomputation saves of each micro-batch, and the most that comes back at one time for it.

    An operator's activations are saved where the operator after it is recomputed as well, and is not the first of a
    block. A run ends at each block and at each operator that is not recomputed.
    """
    family, held = profile.family, held_bytes(profile, names, costs)
    saved = run = peak = 0.0
    for number, (one, after) in enumerate(pairwise(recomputed)):
        if not (one and after):
            peak, run = max(peak, run), 0.0
            continue
        run += held[number]
        ends = family.begins(names[number + 1])
        saved += 0.0 if ends and family.share(names[number]) == 1 else held[number]
        if (ends or number + 2 == len(names)) and family.share(names[number]) == 1:
            peak, run = max(peak, run), 0.0
    return saved, peak


def reshard_times(
    profile: Profile, names: Sequence[str], costs: Sequence[Costs], choices: Sequence[Share]
) -> list[float]:
    """Returns the seconds of the collectives before each operator but the first, nothing where there are none.

    Raises ValueError for one that was not profiled.
    """
    layouts, found = profile.family.layouts, []
    if layouts is None or len(set(choices)) == 1:
        return []  # operators of one choice hand on what the next one wants
    for number in range(1, len(names)):
        change = reshard(layouts(names[number - 1], choices[number - 1])[1], layouts(names[number], choices[number])[0])
        if change is None:
            found.append(0.0)
            continue
        times = profile.links.reshard_s(change, costs[number].input_bytes)
        if times is None:
            raise ValueError(
                f"the profile must have the collectives of a plan (got none of {change.forward} or {change.backward} "
                f"among {change.devices} devices for the input of {names[number]}); change the plan, or profile them"
            )
        found.append(sum(times))
    return found
