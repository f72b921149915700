"""What a step updates: noted when it is asked for, carried out where the unit lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stronghold import native
from stronghold.errors import OffloadedModelError
from stronghold.layout import Part
from stronghold.native import Blocks
from stronghold.optim.adamw_on_device import adamw_on_device
from stronghold.optim.checks import check_changes
from stronghold.unit import ConsumedGradient, HostGrad, Unit, grad_meta_of, gradient_of, note_gradient

if TYPE_CHECKING:
    from stronghold.optim.host_adamw import HostAdamW
    from stronghold.optim.threads import Threads


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

    ``operands`` are what it reads and writes of every parameter in turn, beside the gradient, and ``parts`` what of
    them is updated here. With ``checked``, nothing is updated where a gradient is not finite. Raises
    OffloadedModelError for what it does not take; nothing is written.
    """

    def __init__(self, unit: Unit, changes: list[Change], *, threads: Threads, checked: bool = False) -> None:
        self.unit = unit
        self.changes = changes
        self.threads = threads
        self.checked = checked
        self.scale = 1.0
        """What the gradients are multiplied with."""
        check_changes(unit, changes)
        self.operands: Sequence[Sequence[Tensor]] = [change.operands(unit) for change in changes]
        self.parts: Sequence[Part] = [Part(number, *unit.share(change.index)) for number, change in enumerate(changes)]

    @property
    def moved_bytes(self) -> int:
        """What the update reads and writes of the host's memory."""
        return sum(change.moved_bytes for change in self.changes)

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite; waits for them."""
        return all(bool(torch.isfinite(change.gradient.squares)) for change in self.changes)

    def segments(self) -> list[native.Segment] | None:
        """Counts the step and returns what is to be updated, or None where a gradient is not finite.

        Called in the update's turn. They are whole parameters, of which ``parts`` are to be updated.
        """
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
            self.threads.run(lambda threads: native.adamw(segments, threads=threads), segments)
            return
        for segment, change in zip(segments, self.changes, strict=True):
            adamw_on_device(segment, squares=change.gradient.squares if self.checked else None)

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

    def take_back(self) -> None:
        """Takes the step back from the counts: the gradients turned out not to be finite, and nothing was updated."""
        for change in self.changes:
            change.state["step"] -= 1


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
        changes = [_change(optimizer, unit, index, gradient) for index, gradient in gradients.items()]
        yield Update(unit, changes, threads=optimizer.kernel_threads, checked=checked)


def _change(optimizer: HostAdamW, unit: Unit, index: int, gradient: HostGrad) -> Change:
    """Notes what one parameter's update needs, with its group's settings as they are now."""
    group = optimizer.group_of(unit, index)
    beta1, beta2 = group["betas"]
    return Change(
        index=index,
        gradient=gradient,
        state=optimizer.state_of(unit, index),
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )
