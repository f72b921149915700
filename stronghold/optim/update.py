"""What a step updates: noted when it is asked for, carried out where the unit lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from stronghold import native
from stronghold.errors import OffloadedModelError
from stronghold.layout import Part
from stronghold.optim.adamw_on_device import adamw_on_device
from stronghold.optim.change import Change, Segment
from stronghold.optim.checks import check_changes
from stronghold.optim.muon_in_common import DirectionsInCommon
from stronghold.optim.muon_step import MomentumSegment, StepSegment
from stronghold.unit import ConsumedGradient, HostGrad, Unit, grad_meta_of, gradient_of, note_gradient, note_squares

if TYPE_CHECKING:
    from stronghold.optim.host_adamw import HostAdamW
    from stronghold.optim.threads import Threads

_Of = TypeVar("_Of")


class CountedSteps(NamedTuple):
    """What is left of an update that is under way, without the gradients: they are free once it has read them."""

    squares: Sequence[Tensor]
    """Of each gradient, the sum."""
    steps: Sequence[Tensor]
    """The counts of the parameters' steps."""

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite; waits for them."""
        return all(bool(torch.isfinite(one)) for one in self.squares)

    def take_back(self) -> None:
        """Takes the step back from the counts: the gradients turned out not to be finite, and nothing was updated."""
        for step in self.steps:
            step -= 1


class Update:
    """The update of one unit's parameters, or of this process's share of them.

    ``operands`` are what it reads and writes of every segment in turn, beside the gradient, and ``parts`` what of them
    is updated here. First come the first segments of all parameters, then the second ones of those that have two. With
    ``checked``, nothing is updated where a gradient is not finite. Raises OffloadedModelError for what it does not
    take; nothing is written.
    """

    def __init__(self, unit: Unit, changes: Sequence[Change], *, threads: Threads, checked: bool = False) -> None:
        self.unit = unit
        self.changes = changes
        self.threads = threads
        self.checked = checked
        self.scale = 1.0
        """What the gradients are multiplied with."""
        self._in_common: DirectionsInCommon | None = None
        check_changes(unit, changes)
        operands = _in_turn((change, change.operands(unit)) for change in changes)
        self.operands: Sequence[Sequence[Tensor]] = [tensors for _, tensors in operands]
        self._owners = [change for change, _ in operands]
        """The change that each segment is of."""
        self.parts: Sequence[Part] = [Part(n, *unit.share(change.index)) for n, change in enumerate(self._owners)]

    @property
    def moved_bytes(self) -> int:
        """What the update reads and writes of the host's memory."""
        return sum(change.moved_bytes for change in self.changes)

    @property
    def counted(self) -> CountedSteps:
        """What stays of it behind it."""
        return CountedSteps([c.gradient.squares for c in self.changes], [c.state["step"] for c in self.changes])

    def segments(self) -> list[Segment] | None:
        """Counts the step and returns what is to be updated, or None where a gradient is not finite.

        Called in the update's turn. They are whole parameters, of which ``parts`` are to be updated.
        """
        note_squares(change.gradient for change in self.changes)
        if self.checked and self.unit.weight[0].is_cpu and not self.counted.finite:
            return None
        for change in self.changes:
            step = change.state["step"]
            step.fill_(int(step) + 1)  # which takes a third of what adding does
        scale, checked = self.scale, self.checked
        in_turn = _in_turn((c, c.segments(self.unit, scale=scale, checked=checked)) for c in self.changes)
        segments = [segment for _, segment in in_turn]
        directions = [segment.direction for segment in segments if isinstance(segment, StepSegment)]
        if directions and self.unit.replicas.local_world_size > 1 and not self.unit.resident:
            self._in_common = DirectionsInCommon(directions, self.unit.replicas)
        return segments

    def kernel(self, segments: list[Segment]) -> None:
        """Updates the segments, where they are."""
        on_host = self.unit.weight[0].is_cpu
        for segment in segments:
            if isinstance(segment, MomentumSegment):
                segment.run(self.threads.count)
        adamw = [segment for segment in segments if isinstance(segment, native.Segment)]
        if on_host and adamw:  # while the device is at the matrices
            self.threads.run(lambda threads: native.adamw(adamw, threads=threads), adamw)
        if not on_host and adamw:
            pairs = zip(segments, self._owners, strict=True)
            squares = [change.gradient.squares for one, change in pairs if isinstance(one, native.Segment)]
            adamw_on_device(adamw, squares if self.checked else None)
        for segment in segments:
            if isinstance(segment, StepSegment):
                segment.run(self.threads.count)

    def end(self) -> None:
        """Called when this process has updated its parts of the segments; waits where replicas read those in common."""
        if self._in_common is not None:
            self._in_common.end()
            self._in_common = None

    def done(self) -> None:
        """Called when all segments are updated."""
        self.unit.rewritten()

    def mark_pending(self) -> None:
        """Makes the user wait who uses a gradient before the update has read it."""
        if self.unit.updated is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for change in self.changes:
                gradient = gradient_of(self.unit.parameters[change.index])
                if gradient is not None:
                    note_gradient(gradient, self.unit, known=grad_meta_of(gradient), pending=True)


def gradients_of(optimizer: HostAdamW, unit: Unit) -> dict[int, Tensor]:
    """Returns the gradients that a step uses of one unit, by index. Raises OffloadedModelError for a sparse one."""
    gradients: dict[int, Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for index, parameter in enumerate(unit.parameters):
            gradient = gradient_of(parameter)
            if gradient is None or isinstance(gradient, ConsumedGradient) or not optimizer.updates(unit, index):
                continue
            if gradient.layout != torch.strided:
                raise OffloadedModelError(
                    f"{unit.name} has a gradient of layout {gradient.layout}, and only dense gradients are "
                    "updated; pass sparse=False to its embedding"
                )
            gradients[index] = gradient
    return gradients


def updates_of(
    optimizer: HostAdamW, found: Mapping[Unit, Mapping[int, HostGrad]], *, checked: bool = False
) -> Iterator[Update]:
    """Yields the updates with the gradients ``found``, by index, in the order in which they are to be submitted.

    With ``checked``, nothing of a unit is updated where one of its gradients is not finite. Raises what refuses an
    update; until :meth:`HostAdamW.begun` nothing has changed.
    """
    optimizer.provide({unit: [p for p in its if not optimizer.has_state(unit, p)] for unit, its in found.items()})
    # What the computation itself updates comes last, so that the host is at work meanwhile.
    for unit, gradients in sorted(found.items(), key=lambda item: item[0].resident):
        changes = [optimizer.change(unit, index, gradient) for index, gradient in gradients.items()]
        yield Update(unit, changes, threads=optimizer.kernel_threads, checked=checked)


def _in_turn(given: Iterable[tuple[Change, Sequence[_Of]]]) -> list[tuple[Change, _Of]]:
    """Returns what changes have for each of their segments: the first of all, then the second of those with two."""
    pairs = list(given)
    longest = max((len(its) for _, its in pairs), default=0)
    return [(change, its[turn]) for turn in range(longest) for change, its in pairs if turn < len(its)]
