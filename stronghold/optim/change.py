"""What a step does to one parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stronghold import native
from stronghold.native import Blocks
from stronghold.optim.muon_step import MomentumSegment, StepSegment
from stronghold.optim.states import ADAMW_MOMENTS, ParameterState
from stronghold.unit import HostGrad, Unit

Segment = native.Segment | MomentumSegment | StepSegment
"""What a kernel takes of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Change(ABC):
    """One parameter's update. The settings are copies: a scheduler may change the group before the update runs."""

    index: int
    gradient: HostGrad
    state: ParameterState
    moments: ClassVar[tuple[str, ...]]
    """The names of what its state has beside the step."""

    @abstractmethod
    def operands(self, unit: Unit) -> list[list[Tensor]]:
        """Returns what each of the update's segments reads and writes beside the gradient."""

    @abstractmethod
    def segments(self, unit: Unit, *, scale: float, checked: bool) -> Sequence[Segment]:
        """Returns the update as segments, in their order; ``scale`` multiplies the gradient.

        With ``checked``, on a device, nothing is to change where the gradient is not finite. The step was counted.
        """

    @property
    @abstractmethod
    def moved_bytes(self) -> int:
        """What the update reads and writes of the host's memory."""

    def master(self, unit: Unit) -> list[Tensor]:
        """Returns what the parameter's fp32 master is in: the weight, or that and its remainder."""
        weight, remainder = unit.weight[self.index], unit.remainder(self.index)
        return [weight] if remainder is None else [weight, remainder]

    @property
    def gradient_bytes(self) -> int:
        """What the gradient takes."""
        values, low = self.gradient.values, self.gradient.remainder
        return values.nbytes + (0 if low is None else low.nbytes)


@dataclass(frozen=True, kw_only=True)
class AdamWChange(Change):
    """An update by AdamW: one segment."""

    moments = ADAMW_MOMENTS
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, index: int, gradient: HostGrad, state: ParameterState, group: Mapping[str, Any]) -> AdamWChange:
        """Returns the update with the settings of ``group`` as they are now."""
        beta1, beta2 = group["betas"]
        return cls(
            index=index,
            gradient=gradient,
            state=state,
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )

    def operands(self, unit: Unit) -> list[list[Tensor]]:
        tensors = self.master(unit)
        for moment in (self.state[name] for name in self.moments):
            tensors += [moment] if isinstance(moment, Tensor) else [moment.codes, moment.exponents]
        return [tensors]

    def segments(self, unit: Unit, *, scale: float, checked: bool) -> Sequence[Segment]:
        segment = native.Segment(
            weight=unit.weight[self.index],
            remainder=unit.remainder(self.index),
            grad=self.gradient.values,
            grad_remainder=self.gradient.remainder,
            exp_avg=self.state["exp_avg"],
            exp_avg_sq=self.state["exp_avg_sq"],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=int(self.state["step"]),
            grad_scale=scale,
        )
        return [segment]

    @property
    def moved_bytes(self) -> int:
        # The master, whole or as two halves, and both moments are read and written.
        of_moments = 2 * 2 if isinstance(self.state["exp_avg"], Blocks) else 4 * 2 * 2
        return self.gradient_bytes + (4 * 2 + of_moments) * self.gradient.values.numel()
