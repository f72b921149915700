"""How long a training step takes, by the engine's own schedule: what each resource does when, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from stronghold.planner.disk_play import DiskPlay
from stronghold.planner.issuing import program_of
from stronghold.planner.play import Played, play
from stronghold.planner.program import Kind, Operation, Program, Shape
from stronghold.planner.step_costs import LayerWork, Machine, Resource, RootWork, StepSettings
from stronghold.planner.step_seconds import chunks_of, disk_s_of, work_s_of
from stronghold.spans import Span

PLAYED_PASSES = 2
STEADY_STEPS = 2
"""Steps at the end of a program that are averaged: buffers that take turns can make them differ by twos."""

CAUSES = {
    Kind.FETCH: "fetch",
    Kind.UPLOAD: "fetch",
    Kind.READ: "disk",
    Kind.SETTLE: "disk",
    Kind.GRADIENTS: "gradients",
    Kind.ADD: "gradients",
    Kind.INPUTS_DOWN: "inputs",
    Kind.INPUTS_UP: "fetch",
    Kind.INPUTS_WRITE: "disk",
    Kind.INPUTS_READ: "disk",
    Kind.MOMENTUM: "update",
    Kind.ITERATE: "update",
    Kind.UPDATE: "update",
    Kind.STEP: "update",
    Kind.LAUNCH: "launch",
    Kind.LAUNCH_BACKWARD: "launch",
    Kind.LAUNCH_UPDATE: "launch",
}
"""What the computation waits for while an operation is under way that holds it up."""
_WAIT_FOR_DISK = (Kind.READ, Kind.SETTLE, Kind.INPUTS_WRITE, Kind.INPUTS_READ)
"""These do nothing themselves: what they wait for is the disk's."""


class StepTime:
    """One steady step, from the end of the optimizer's step before to the end of its own: ``step_s`` seconds.

    Of many passes it has those in the middle in its seconds, and not in its ``spans``.

    ``busy_s`` is what each resource works in it, by the lower-case names of ``Resource``, and ``longest`` the one that
    works most: no step can be shorter. ``waits_s`` is what the computation stands still for, by the values of
    ``CAUSES``: together with what it computes it is the step. ``spans`` are what is under way in it, in seconds from
    its beginning: what the step before has left begins before 0, and what goes on ends behind ``step_s``.
    """

    def __init__(self, program: Program, played: Played, layers: int) -> None:
        self._program, self._played, self._layers = program, played, layers
        self._begin_s, self._end_s = (played.ends_s[end] for end in program.ends[-2:])
        before_s = played.ends_s[program.ends[-1 - STEADY_STEPS]]
        self.step_s = (self._end_s - before_s) / STEADY_STEPS

    def with_more(self, more: int, shorter: StepTime) -> StepTime:
        """Returns the step with so many passes ``more``, of which it has one more than the ``shorter`` one."""
        longer = copy(self)
        longer.step_s = self.step_s + more * (self.step_s - shorter.step_s)
        longer.busy_s, longer.waits_s = (
            {name: seconds + more * (seconds - less[name]) for name, seconds in of_self.items()}
            for of_self, less in ((self.busy_s, shorter.busy_s), (self.waits_s, shorter.waits_s))
        )
        return longer

    @cached_property
    def busy_s(self) -> dict[str, float]:
        busy_s = {resource.name.lower(): 0.0 for resource in Resource}
        until_s = dict.fromkeys(busy_s, self._begin_s)
        for span in sorted(self._worked, key=lambda span: span.begin_s):
            # A transfer of the disk's that gives way to a more urgent one is under way as long as that, too.
            since_s = max(span.begin_s, until_s[span.lane])
            until_s[span.lane] = max(since_s, min(span.end_s, self._end_s))
            busy_s[span.lane] += until_s[span.lane] - since_s
        return busy_s

    @property
    def longest(self) -> str:
        return max(self.busy_s, key=self.busy_s.__getitem__)

    @cached_property
    def waits_s(self) -> dict[str, float]:
        waits_s = dict.fromkeys(CAUSES.values(), 0.0)
        for span in self._waited:
            waits_s[span.name] += span.end_s - span.begin_s
        return waits_s

    def _name(self, unit: int) -> str:
        return f"layer {unit}" if unit < self._layers else f"root {unit - self._layers}"

    @property
    def spans(self) -> list[Span]:
        origin_s = self._begin_s
        spans = [
            one._replace(begin_s=one.begin_s - origin_s, end_s=one.end_s - origin_s)
            for one in [*self._worked, *self._waited]
        ]
        return sorted(spans, key=lambda span: (span.begin_s, span.end_s))

    @cached_property
    def _worked(self) -> list[Span]:
        """What takes time and is under way in the step."""
        played, begin_s, end_s = self._played, self._begin_s, self._end_s
        spans = [
            Span(one.resource.name.lower(), f"{one.kind.value} {self._name(one.number)}", from_s, to_s)
            for one, from_s, to_s in zip(self._program.operations, played.begins_s, played.ends_s, strict=True)
            if from_s < end_s and to_s > begin_s and to_s > from_s and one.kind not in _WAIT_FOR_DISK
        ]
        return spans + [
            Span("disk", f"{'write' if job.is_write else 'read'} {self._name(job.unit)}", job.began_s, job.ended_s)
            for job in played.disk_jobs
            if job.began_s < end_s and job.ended_s > begin_s
        ]

    @cached_property
    def _waited(self) -> list[Span]:
        """What the computation stands still for in the step.

        What holds it up is followed backwards: the operation that it begins behind for as long as that was under way,
        then what that one had begun behind, as far back as the computation stands still.
        """
        operations, begins_s, ends_s = self._program.operations, self._played.begins_s, self._played.ends_s
        before, last = self._program.ends[-2:]
        # A device that is behind the host may still be at the step before.
        done = max((here for here in range(before) if operations[here].resource is Resource.COMPUTE), default=before)
        waited, computed_s = list[Span](), max(self._begin_s, ends_s[done])
        for here in range(before + 1, last + 1):
            if operations[here].resource is not Resource.COMPUTE and operations[here].kind is not Kind.END:
                continue
            until_s, held_up = begins_s[here], here
            while until_s > computed_s:
                held_up = max(operations[held_up].after, key=lambda before: (ends_s[before], before))
                for cause, since_s in (
                    ("disk", ends_s[held_up]),
                    (self._cause(operations[held_up]), begins_s[held_up]),
                ):
                    since_s = max(computed_s, since_s)
                    if since_s < until_s:
                        assert cause is not None
                        waited.append(Span("waits", cause, since_s, until_s))
                        until_s = since_s
            computed_s = max(computed_s, ends_s[here])
        return waited

    def _cause(self, held_up: Operation) -> str | None:
        """Returns what a wait for an operation is counted as: as the engine does, of what is on disk for the disk."""
        uses, number = self._program.uses, held_up.number
        if held_up.kind is Kind.FETCH and (Kind.READ, number) in uses:
            return "disk"
        if held_up.kind is Kind.INPUTS_UP and (Kind.INPUTS_WRITE, number) in uses:
            return "disk"
        return CAUSES.get(held_up.kind)


def step_time(
    layers: Sequence[LayerWork], machine: Machine, settings: StepSettings, root: Sequence[RootWork] = ()
) -> StepTime:
    """Returns what a steady step of a model takes on ``machine`` under ``settings``, and what happens in it.

    The engine's own schedule says what moves when; clocks say how long. Not in it: evaluation and replicas. A layer's
    inputs count as one run's, over all micro-batches. All passes of a step but the first are alike, for each ends when
    its gradients are added up: two are played, beside one.

    Raises ValueError for settings that the engine would refuse.
    """
    if settings.passes > PLAYED_PASSES:
        more = settings.passes - PLAYED_PASSES
        two, one = (
            step_time(layers, machine, replace(settings, passes=n), root) for n in (PLAYED_PASSES, PLAYED_PASSES - 1)
        )
        return two.with_more(more, one)
    program = program_of(_shape(layers, machine, settings, root))
    work_s = work_s_of(program, layers, root, machine, settings)
    disk = DiskPlay(program, *disk_s_of(program, [*layers, *root], machine)) if program.on_disk else None
    return StepTime(program, play(program, work_s, machine.slowed, disk), len(layers))


def _shape(layers: Sequence[LayerWork], machine: Machine, settings: StepSettings, root: Sequence[RootWork]) -> Shape:
    resident = frozenset(settings.resident)
    if not layers or not resident <= frozenset(range(len(layers))):
        raise ValueError(
            f"resident must hold numbers of layers (got {sorted(resident)} of {len(layers)} layers); pass fewer"
        )
    if settings.passes > 1 and settings.in_backward:
        raise ValueError(
            f"layers that are updated in the backward pass accumulate no gradients (got passes={settings.passes} with "
            "in_backward); plan with one pass, or for deferred updates"
        )
    streamed = len(layers) - len(resident)
    if not 1 <= settings.window <= max(1, streamed):
        raise ValueError(
            f"window must be between 1 and the number of layers that are not resident (got {settings.window} of "
            f"{streamed}); pass a smaller window"
        )
    return Shape(
        window=settings.window,
        resident=resident,
        trained=tuple(layer.elements > 0 for layer in layers),
        on_disk=tuple(layer.on_disk for layer in layers),
        chunks=(
            *(0 if number in resident else chunks_of(layer) for number, layer in enumerate(layers)),
            *(chunks_of(one) if _root_update(one) is Kind.UPDATE else 0 for one in root),
        ),
        root_first=tuple(one.first for one in root),
        root_updates=tuple(map(_root_update, root)),
        in_backward=settings.in_backward,
        staged=settings.staged,
        runs_behind=machine.runs_behind,
        iterated=frozenset(
            number for number, unit in enumerate([*layers, *root]) if unit.matrices and machine.iterates_beside
        ),
        inputs=frozenset(number for number, layer in enumerate(layers) if layer.input_bytes),
        inputs_on_disk=any(layer.inputs_on_disk for layer in layers),
        passes=settings.passes,
    )


def _root_update(one: RootWork) -> Kind | None:
    return None if not one.elements else Kind.UPDATE_ON_DEVICE if one.resident else Kind.UPDATE
