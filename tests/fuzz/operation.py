"""What an operation of a program is, and what the loop does: passes, steps, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.fuzz.models import batch
from tests.fuzz.plainly import Plainly
from tests.fuzz.twin import Twin


class Boom(Exception):
    """The user's own error."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Operation(Plainly):
    """Something that a user does; what :meth:`run` returns is compared."""

    parts: ClassVar[bool] = False
    """Whether it takes a step apart, or looks at gradients: with in_backward nothing is as in plain PyTorch then."""
    loosens: ClassVar[bool] = False
    """Whether bf16 weights may from then on differ in their low bits, by what README says."""

    def run(self, twin: Twin) -> Any:
        raise NotImplementedError

    def labels(self) -> list[str]:
        """Returns what tells one cause from another: the operation's name, and how it is done."""
        hows = [getattr(self, name) for name in ("how", "what") if hasattr(self, name)]
        in_place = ["zeroed in place"] if not getattr(self, "to_none", True) else []
        return [":".join([type(self).__name__, *map(str, hows)]), *in_place]


def gradients(twin: Twin) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in twin.parameters()}


@dataclass(frozen=True, kw_only=True, repr=False)
class Train(Operation):
    """One whole step."""

    batch: int = 0
    to_none: bool = True

    def run(self, twin: Twin) -> Any:
        loss = twin.loss(self.batch, self.batch)
        twin.backward(loss)
        twin.step()
        twin.zero_grad(self.to_none)
        return loss.detach()


@dataclass(frozen=True, kw_only=True, repr=False)
class Accumulate(Operation):
    """One step of several backward passes."""

    parts = True
    loosens = True
    batches: tuple[int, ...] = (0, 1)

    def run(self, twin: Twin) -> Any:
        losses = []
        for number in self.batches:
            loss = twin.loss(number)
            twin.backward(loss / len(self.batches))
            losses.append(loss.detach())
        twin.step()
        twin.zero_grad()
        return losses


@dataclass(frozen=True, kw_only=True, repr=False)
class Forward(Operation):
    """A forward pass whose graph is kept for a backward pass to come, or none."""

    batch: int = 0

    def run(self, twin: Twin) -> Any:
        loss = twin.loss(self.batch, self.batch)
        twin.losses.append(loss)
        return loss.detach().clone()


@dataclass(frozen=True, kw_only=True, repr=False)
class Backward(Operation):
    """The backward pass of one or all of the graphs that are kept."""

    parts = True
    loosens = True
    which: int = -1
    retain: bool = False
    together: bool = False

    def run(self, twin: Twin) -> Any:
        if not twin.losses:
            return None
        if self.together:
            losses, twin.losses = twin.losses, []
            twin.backward(torch.stack(losses).sum())
            return None
        which = self.which % len(twin.losses)
        loss = twin.losses[which] if self.retain else twin.losses.pop(which)
        twin.backward(loss, retain_graph=self.retain)
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class Step(Operation):
    parts = True

    def run(self, twin: Twin) -> Any:
        twin.step()


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeroGrad(Operation):
    parts = True
    to_none: bool = True
    by_model: bool = False

    def run(self, twin: Twin) -> Any:
        if self.by_model:
            twin.model.zero_grad(self.to_none)
        twin.zero_grad(self.to_none)


@dataclass(frozen=True, kw_only=True, repr=False)
class Clip(Operation):
    """What clips gradients between backward and step."""

    parts = True
    how: str = "norm"
    loosens = True

    def run(self, twin: Twin) -> Any:
        parameters = list(twin.model.parameters())
        if self.how == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.01)
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, 0.05, foreach=self.how == "foreach" or None)


@dataclass(frozen=True, kw_only=True, repr=False)
class Gradient(Operation):
    """Looks at one gradient, or writes it, in one of many ways."""

    parts = True
    loosens = True
    how: str = "read"
    target: int = 0

    def run(self, twin: Twin) -> Any:
        _, parameter = twin.target(self.target)
        if self.how == "all":
            return gradients(twin)
        gradient = parameter.grad
        if gradient is None:
            return None
        GRADIENT_WRITES[self.how](parameter, gradient)
        return None if parameter.grad is None else parameter.grad.clone()


def _set(parameter: Tensor, value: Tensor | None) -> None:
    parameter.grad = value


GRADIENT_WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "read": lambda p, g: None,
    "mul_": lambda p, g: g.mul_(0.5),
    "data": lambda p, g: g.data.mul_(0.5),
    "set": lambda p, g: _set(p, g * 2),
    "same": lambda p, g: _set(p, g),
    "none": lambda p, g: _set(p, None),
    "sum": lambda p, g: _set(p, g + g.sign() * 0.01),
    "zero_": lambda p, g: g.zero_(),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluate(Operation):
    """A forward pass that no backward pass follows; ``hold`` keeps its output, and the graph that it may have."""

    batch: int = 0
    how: str = "no_grad"
    hold: bool = False
    eval: bool = True

    def run(self, twin: Twin) -> Any:
        before = twin.model.training
        twin.model.train(before and not self.eval)
        contexts: dict[str, Callable[[], Any]] = {
            "no_grad": torch.no_grad,
            "grad": torch.enable_grad,
            "inference": torch.inference_mode,
        }
        with contexts[self.how]():
            y = twin.model(batch(self.batch), self.batch)
        twin.model.train(before)
        if self.hold:
            twin.held.append(("output", y, 0))
        return y.detach().clone()


@dataclass(frozen=True, kw_only=True, repr=False)
class Explode(Operation):
    """The user's own error in a layer's forward or backward pass; ``what`` then stands in the gradients is compared."""

    loosens = True
    how: str = "forward"
    layer: int = 0
    batch: int = 0

    @property
    def parts(self) -> bool:  # type: ignore[override]
        return self.how == "backward"

    def run(self, twin: Twin) -> Any:
        def fail(*_: Any) -> None:
            raise Boom

        def in_backward(module: Any, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)

        inner = twin.layer(self.layer).inner
        handle = inner.register_forward_hook(fail if self.how == "forward" else in_backward)  # type: ignore[arg-type]
        try:
            loss = twin.loss(self.batch)
            if self.how == "backward":
                twin.backward(loss)
        except Boom:
            return gradients(twin) if self.how == "backward" else None
        finally:
            handle.remove()
            if self.how == "backward":
                twin.zero_grad()
        return None
