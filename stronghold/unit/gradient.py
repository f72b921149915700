"""Gradients that know what is under way with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from stronghold.unit.calls import FACTS, asking_collective, hands_out, key_of, walk, written
from stronghold.unit.compiler import opaque
from stronghold.unit.consumed import Consumed, ConsumedNorm
from stronghold.unit.copies import blocking
from stronghold.unit.unit import Unit


@dataclass(frozen=True)
class HostGrad:
    """One parameter's gradient as an update takes it: complete, contiguous, where the update runs.

    With a ``remainder`` it is the fp32 number that ``values`` and it hold. ``squares`` is the sum of its squares, a
    float64 number. What the update uses up is ``consumed``. With a ``source``, which is complete on the device,
    ``values`` and ``remainder`` are room on the host: to copy them down is the update's first part.
    """

    values: Tensor
    squares: Tensor
    remainder: Tensor | None = None
    consumed: Consumed | None = None
    source: HostGrad | None = None

    @property
    def of_user(self) -> Tensor:
        """The memory of the parameter's own gradient, which the user may write."""
        return self.values if self.source is None else self.source.values


def note_squares(gradients: Iterable[HostGrad]) -> None:
    """Keeps the squares of what an update of one unit uses up, in one copy, which on a device is one launch.

    Called when they are there, before their memory is free for others.
    """
    used = [(gradient.consumed, gradient.squares) for gradient in gradients if gradient.consumed is not None]
    if used:
        kept = torch.stack([squares for _, squares in used]).unbind()
        for (consumed, _), squares in zip(used, kept, strict=True):
            consumed.squares = squares


@dataclass(frozen=True, eq=False)
class GradMeta:
    """What the engine knows of a gradient beside its values, until the user writes it.

    ``squares`` is the sum of its squares, a float64 number; ``remainder`` holds the low halves of a sum of several
    bf16 gradients, or is None. Both lie in memory that the next gradient at this ``index`` uses again.
    """

    index: int
    squares: Tensor
    remainder: Tensor | None = None


class OffloadedGradient(Tensor):
    """What a gradient of the engine's is: an ordinary tensor that knows who reads and writes it.

    While an update under way still reads it, a user who looks waits. What is ``known`` of it holds until it is written,
    or aliased by a tensor of the user's. With neither, it becomes a plain tensor, with two exceptions. One of replicas
    stays, for it raises OffloadedModelError where it is written. One on the host beside a device stays, for it waits
    for what copies it to there or from there; a copy by an alias is not seen, and is waited for at its next use.
    """

    _unit: weakref.ref[Unit]
    """Weakly: the garbage collector does not see the way from a parameter to its gradient."""
    pending: bool
    known: GradMeta | None
    aliased: bool

    @classmethod
    @opaque
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if ConsumedNorm in types:
            return NotImplemented  # it is asked first
        kwargs = kwargs or {}
        key = key_of(func)
        seen = []
        if key == "is_complex" and (collective := asking_collective()):
            _reduced(args[0], collective)
        elif key not in FACTS:
            args, kwargs = blocking(key, args, kwargs)
            seen = [v for v in walk((args, tuple(kwargs.values()))) if isinstance(v, OffloadedGradient)]
            targets = {id(target) for target in written(func, args, kwargs)}
            for value in seen:
                if id(value) in targets and (unit := value._unit()) is not None:
                    unit.check_own()
            for value in seen:
                _settle(value, forget=id(value) in targets)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for value in seen:
            if type(value) is OffloadedGradient and hands_out(key, result, value):
                _hand_out(value)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        _settle(self, forget=False)
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.detach().as_subclass(Tensor))

    def __reduce_ex__(self, protocol: SupportsIndex):
        _settle(self, forget=True)
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        _settle(self, forget=False)
        with torch._C.DisableTorchFunctionSubclass():
            return memo.setdefault(id(self), self.detach().clone())


def _settle(gradient: Tensor, *, forget: bool) -> None:
    if type(gradient) is not OffloadedGradient:
        return
    unit = gradient._unit()
    if gradient.pending:
        if unit is not None:
            unit.wait_updated()
        gradient.pending = False
    if gradient.aliased and unit is not None:
        unit.copies.wait()
    if forget:
        gradient.known = None
    with torch._C.DisableTorchFunctionSubclass():
        if unit is not None and unit.copies.go_on_beside and gradient.is_cpu:
            return
    if forget or (gradient.known is None and not _is_of_replicas(gradient)):
        _make_plain(gradient)


def _make_plain(gradient: Tensor) -> None:
    gradient.__dict__.clear()
    gradient.__class__ = Tensor  # type: ignore[assignment]


def _hand_out(gradient: OffloadedGradient) -> None:
    """Called when the user has another way to a gradient's memory, by which he may write it."""
    unit = gradient._unit()
    if unit is None or unit.replicas.world_size == 1 or unit.is_root or unit.resident or gradient.known is None:
        _settle(gradient, forget=True)
        if type(gradient) is OffloadedGradient:
            gradient.aliased = True
        return
    with torch._C.DisableTorchFunctionSubclass():
        unit.handed_out.note(gradient.known.index, gradient.detach(), of_gradient=True)


def _reduced(gradient: Tensor, collective: str) -> None:
    """Called before a ``collective`` of the user's writes into a gradient, or reads it."""
    if type(gradient) is OffloadedGradient and (unit := gradient._unit()) is not None and "reduce" in collective:
        unit.check_own()
    _settle(gradient, forget=True)


def _is_of_replicas(gradient: OffloadedGradient) -> bool:
    unit = gradient._unit()
    return unit is not None and unit.replicas.world_size > 1


def make_plain(gradient: Tensor) -> bool:
    """Makes a gradient of the engine's a plain tensor, once no update reads it: another program may write it.

    Returns whether it is to be the engine's again when that has ended, by :func:`make_ours`.
    """
    if type(gradient) is not OffloadedGradient:
        return False
    _settle(gradient, forget=True)
    stays = type(gradient) is OffloadedGradient
    _make_plain(gradient)
    return stays


def make_ours(gradient: Tensor, unit: Unit) -> None:
    """Notes that it is a gradient of the engine's, of which others may hold aliases."""
    note_gradient(gradient, unit)
    if type(gradient) is OffloadedGradient:
        gradient.aliased = True


def note_gradient(gradient: Tensor, unit: Unit, *, known: GradMeta | None = None, pending: bool = False) -> None:
    """Makes ``gradient``, a plain tensor or one of ours, know what is given; anything else is left as it is."""
    if type(gradient) in (Tensor, OffloadedGradient):
        aliased = type(gradient) is OffloadedGradient and gradient.aliased
        gradient.__class__ = OffloadedGradient
        gradient.__dict__.update(_unit=weakref.ref(unit), known=known, pending=pending, aliased=aliased)


def latest(unit: Unit, known: GradMeta) -> GradMeta:
    """Notes that what was known of the gradient before at this index no longer holds; returns ``known``."""
    unit.gradients.known[known.index] = known
    return known


def grad_meta_of(gradient: Tensor | None) -> GradMeta | None:
    """Returns what is known of a gradient beside its values, or None."""
    if type(gradient) is not OffloadedGradient or gradient.known is None:
        return None
    # A gradient that the user set aside may come back when another one's sums have taken its place.
    unit = gradient._unit()
    newest = unit.gradients.known.get(gradient.known.index) if unit is not None else None
    return gradient.known if newest is gradient.known else None


def gradient_name(unit: Unit, index: int) -> str:
    """Returns what an error calls a gradient: the unit's name, and which of its parameters it is of."""
    which = "" if unit.is_root else f", parameter {index} of shape {list(unit.shapes[index])}"
    return f"the gradient of {unit.name}{which}"
