"""What a step of Muon does to one matrix, and where its direction lies on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stronghold.optim.change import Change, Segment
from stronghold.optim.muon_step import Direction, MomentumSegment, StepSegment, adjusted_lr
from stronghold.optim.states import MUON_MOMENTS, ParameterState
from stronghold.unit import HostGrad, Unit


@dataclass(frozen=True, kw_only=True)
class MuonChange(Change):
    """An update by Muon: a segment for the momentum, and one for the weight when the direction is there.

    ``room`` is the host's memory for the direction, of a matrix that is not resident.
    """

    moments = MUON_MOMENTS
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, ...]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    room: Tensor | None

    @classmethod
    def of(
        cls,
        index: int,
        gradient: HostGrad,
        state: ParameterState,
        group: dict[str, Any],
        room: Tensor | None,
    ) -> MuonChange:
        """Returns the update with the settings of ``group`` as they are now."""
        return cls(
            index=index,
            gradient=gradient,
            state=state,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            ns_coefficients=tuple(map(float, group["ns_coefficients"])),
            eps=float(group["eps"]),
            ns_steps=group["ns_steps"],
            adjust_lr_fn=group["adjust_lr_fn"],
            room=room,
        )

    def operands(self, unit: Unit) -> list[list[Tensor]]:
        return [[self.state[name] for name in self.moments], self.master(unit)]

    def segments(self, unit: Unit, *, scale: float, checked: bool) -> Sequence[Segment]:
        shape, weight = unit.shapes[self.index], unit.weight[self.index]
        resident, values = self.room is None, self.room
        if values is None:
            values = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
        direction = Direction(
            values,
            None if resident else unit.waits,
            coefficients=self.ns_coefficients,
            steps=self.ns_steps,
            eps=self.eps,
        )
        squares = self.gradient.squares if checked and not weight.is_cpu else None
        momentum = MomentumSegment(
            direction=direction,
            values=values,
            grad=self.gradient.values,
            grad_remainder=self.gradient.remainder,
            momentum_buffer=self.state["momentum_buffer"],
            momentum=self.momentum,
            nesterov=self.nesterov,
            grad_scale=scale,
            squares=squares,
        )
        step = StepSegment(
            direction=direction,
            values=values,
            weight=weight,
            remainder=unit.remainder(self.index),
            lr=adjusted_lr(self.lr, self.adjust_lr_fn, shape),
            decay=self.lr * self.weight_decay,
            squares=squares,
        )
        return [momentum, step]

    @property
    def moved_bytes(self) -> int:
        # The momentum and the master are read and written, the direction is written, carried up and down, and read.
        return self.gradient_bytes + (4 * 2 + 4 * 2 + 2 * 4) * self.gradient.values.numel()
