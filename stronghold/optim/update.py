"""One unit's update: what it needs, noted when it is asked for; carried out by the update stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stronghold import native
from stronghold.device import Event
from stronghold.home import Home


@dataclass(frozen=True, kw_only=True)
class Change:
    """One parameter's update. The settings are copies: a scheduler may change the group before the update runs."""

    place: int
    gradient: Tensor
    state: dict[str, Tensor]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Update:
    """The update of one unit's parameters, in one call of the kernel."""

    def __init__(self, home: Home, changes: list[Change]) -> None:
        self.home = home
        self.changes = changes
        self.threads = 1
        self.finite: Callable[[list[Tensor]], bool] | None = None

    def submit(self, scale: float, after: Event | None = None) -> Event:
        """Gives the update to the update stream, behind ``after``; returns its event.

        ``scale`` multiplies the gradients. The unit's weights are stale on the device from now on.
        """
        assert self.home.owner is not None
        elements = sum(change.gradient.numel() for change in self.changes)
        self.home.generation += 1
        self.home.updated = self.home.owner.update(self.home, lambda: self._run(scale), elements, after)
        return self.home.updated

    def _run(self, scale: float) -> None:
        home, changes = self.home, self.changes
        if self.finite is not None and not self.finite([change.gradient for change in changes]):
            return
        low = home.dtype == torch.bfloat16
        segments = []
        for change in changes:
            change.state["step"] += 1
            weight = home.master(change.place)
            segments.append(
                native.Segment(
                    weight=weight,
                    grad=change.gradient,
                    exp_avg=change.state["exp_avg"],
                    exp_avg_sq=change.state["exp_avg_sq"],
                    low=home.weight[change.place] if low else None,
                    lr=change.lr,
                    beta1=change.betas[0],
                    beta2=change.betas[1],
                    eps=change.eps,
                    weight_decay=change.weight_decay,
                    step=int(change.state["step"]),
                    grad_scale=scale,
                )
            )
        native.adamw(segments, threads=self.threads)
