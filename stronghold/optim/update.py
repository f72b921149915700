"""One unit's update: what it needs, noted when it is asked for; carried out where the unit lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stronghold import native
from stronghold.device import Event
from stronghold.layout import Part
from stronghold.native import Blocks
from stronghold.optim.adamw_on_device import adamw_on_device
from stronghold.optim.checks import check_changes
from stronghold.unit import HostGrad, Prepared, Unit, grad_meta_of, gradient_of, note_gradient


@dataclass(frozen=True, kw_only=True)
class Change:
    """One parameter's update. The settings are copies: a scheduler may change the group before the update runs."""

    index: int
    gradient: HostGrad
    state: dict[str, Any]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def operands(self, unit: Unit) -> list[Tensor]:
        """Returns what the update reads and writes beside the gradient."""
        tensors = [unit.weight[self.index]]
        if (remainder := unit.remainder(self.index)) is not None:
            tensors.append(remainder)
        for moment in (self.state["exp_avg"], self.state["exp_avg_sq"]):
            tensors += [moment] if isinstance(moment, Tensor) else [moment.codes, moment.exponents]
        return tensors

    @property
    def moved_bytes(self) -> int:
        """What the update reads and writes of the host's memory."""
        values, moment = self.gradient.values, self.state["exp_avg"]
        per_element = 4 * 2 + values.element_size()  # the master, whole or as two halves, and the gradient
        per_element += 2 if self.gradient.remainder is not None else 0
        per_element += 2 * 2 if isinstance(moment, Blocks) else 4 * 2 * 2
        return per_element * values.numel()


class Update:
    """The update of one unit's parameters, or of this process's share of them, in one call of the kernel.

    With ``checked``, nothing is updated where a gradient is not finite.
    """

    def __init__(self, unit: Unit, changes: list[Change], *, threads: int, checked: bool = False) -> None:
        self.unit = unit
        self.changes = changes
        self.threads = threads
        self.checked = checked
        self.scale = 1.0
        self._prepared: Prepared | None = None
        self.operands: Sequence[Sequence[Tensor]] = ()
        self.parts: Sequence[Part] = [Part(number, *unit.share(change.index)) for number, change in enumerate(changes)]

    def prepare(self) -> None:
        """Takes all memory that the update needs and raises what it is refused for; nothing is written."""
        unit = self.unit
        assert unit.owner is not None
        check_changes(unit, self.changes)
        self.operands = [change.operands(unit) for change in self.changes]
        self._prepared = unit.owner.prepare(unit, self, sum(change.moved_bytes for change in self.changes))

    def cancel(self) -> None:
        """Gives up what was prepared."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.cancel()

    def submit(self, scale: float, after: Event | None = None) -> Event | None:
        """Gives the update, which is prepared, to its place in line, behind ``after``; returns its event, if any.

        ``scale`` multiplies the gradients. The unit's weights are stale on the device from now on.
        """
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        self.scale = scale
        self.unit.generation += 1
        self.unit.updated = prepared.submit(after)
        return self.unit.updated

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite; waits for them."""
        return all(bool(torch.isfinite(change.gradient.squares)) for change in self.changes)

    def segments(self) -> list[native.Segment] | None:
        """Counts the step and returns what is to be updated, or None where a gradient is not finite."""
        for change in self.changes:
            change.gradient.note()
        if self.checked and self.unit.weight[0].is_cpu and not self.finite:
            return None
        segments = []
        for change in self.changes:
            change.state["step"] += 1
            segments.append(
                native.Segment(
                    weight=self.unit.weight[change.index],
                    remainder=self.unit.remainder(change.index),
                    grad=change.gradient.values,
                    grad_remainder=change.gradient.remainder,
                    exp_avg=change.state["exp_avg"],
                    exp_avg_sq=change.state["exp_avg_sq"],
                    lr=change.lr,
                    beta1=change.betas[0],
                    beta2=change.betas[1],
                    eps=change.eps,
                    weight_decay=change.weight_decay,
                    step=int(change.state["step"]),
                    grad_scale=self.scale,
                )
            )
        return segments

    def kernel(self, segments: list[native.Segment]) -> None:
        """Updates the segments, where they are."""
        if self.unit.weight[0].is_cpu:
            native.adamw(segments, threads=self.threads)
            return
        for segment, change in zip(segments, self.changes, strict=True):
            adamw_on_device(segment, squares=change.gradient.squares if self.checked else None)

    def done(self) -> None:
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

    def take_back(self) -> None:
        """Takes the step back from the counts: the gradients turned out not to be finite, and nothing was updated."""
        for change in self.changes:
            change.state["step"] -= 1
