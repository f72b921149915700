"""What stands for gradients that ``update="in_backward"`` has used up: their norm is known, their values are gone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.unit.calls import FACTS, key_of, walk
from stronghold.unit.compiler import opaque
from stronghold.unit.unit import Unit

_NORMS = frozenset(["vector_norm", "linalg_vector_norm", "norm", "_foreach_norm"])
_SCALES = frozenset(
    [
        *("mul_", "multiply_", "__imul__", "_foreach_mul_"),
        *("div_", "divide_", "true_divide_", "__itruediv__", "_foreach_div_"),
    ]
)


class Consumed:
    """One gradient that an update uses up; the update leaves the sum of its squares here."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        self.squares: Tensor | None = None
        """A float64 number of its own; None until the update has run."""

    def norm(self) -> Tensor:
        """Returns the gradient's norm, float64; waits for the update under way."""
        if (unit := self._unit()) is not None:
            unit.wait_updated()
        if self.squares is None:
            raise consumed_error()
        return self.squares.sqrt()


class ConsumedGradient(Tensor):
    """What stands for a gradient that is used up: it tells its norm, and every other look at it is an error."""

    _consumed: Consumed

    @classmethod
    @opaque
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, key = kwargs or {}, key_of(func)
        if key in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if key in ("detach", "get:data"):
            return args[0]
        if key in _NORMS:
            return _norms_of(key, *_norm_arguments(*args, **kwargs))
        if key in _SCALES:
            return _scaled(args, kwargs)
        raise consumed_error()


class ConsumedNorm(Tensor):
    """A norm of gradients of which some are used up, and what is computed from it.

    It is a number like any other, but no gradient can be scaled by it: the first that is tried raises, so that no
    other is scaled before.
    """

    @classmethod
    @opaque
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, key = kwargs or {}, key_of(func)
        if key in _SCALES and not isinstance(args[0], ConsumedNorm):
            return _scaled(args, kwargs)
        others = {id(one) for one in walk((args, tuple(kwargs.values()))) if not isinstance(one, ConsumedNorm)}
        return _as_norm(func(*_plain(args), **_plain(kwargs)), others)


def consumed_error() -> RuntimeError:
    return OffloadedModelError(
        "update='in_backward' updates each layer during backward() and frees its gradient, so that no gradient can be "
        "read (but for its norm of order 2), unscaled by a GradScaler, clipped over the whole model, or added to by a "
        "second backward() before step() and zero_grad(); use update='deferred' for loss scaling, clipping and "
        "accumulation"
    )


class StandIns:
    """Makes what stands for gradients; those of one shape are of one number on the device, kept for the next pass."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    def of(self, parameter: Tensor, consumed: Consumed) -> ConsumedGradient:
        """Returns a tensor of the parameter's shape and dtype, on its device, without memory of that size."""
        with torch._C.DisableTorchFunctionSubclass():
            key = parameter.shape, parameter.dtype, parameter.device
            if (one := self._known.get(key)) is None:
                with torch.inference_mode(False):  # it is kept; to make it launches nothing
                    one = self._known[key] = torch.empty((), dtype=key[1], device=key[2]).expand(key[0])
            gradient = one.as_subclass(ConsumedGradient)
        gradient.__dict__["_consumed"] = consumed
        return gradient


def _norm_arguments(
    input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None, p: Any = None
) -> tuple[Any, torch.dtype | None]:
    """Returns what the norm is asked of, and its dtype. Raises where it is not one of order 2 over all elements."""
    order = ord if p is None else p
    if order not in (2, "fro", None) or dim is not None or keepdim or out is not None:
        raise consumed_error()
    return input, dtype


def _norms_of(key: str, given: Tensor | Sequence[Tensor], dtype: torch.dtype | None) -> Any:
    if key == "_foreach_norm":
        return [_norm_of(tensor, dtype) for tensor in given]
    assert isinstance(given, Tensor)
    return _norm_of(given, dtype)


def _norm_of(gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(gradient, ConsumedGradient):
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    norm = gradient._consumed.norm()
    return norm.to(gradient.device, dtype or gradient.dtype).as_subclass(ConsumedNorm)


def _scaled(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Scales gradients by a factor, which leaves them as they are. Raises where it would not."""
    factor = _plain(args[1] if len(args) > 1 else next(iter(kwargs.values()), None))
    known = isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.numel() == 1)
    number = float(factor) if known else None
    # Gradients that are not finite are the step's business, which raises or leaves everything as it is.
    if number == 1.0 or (number is not None and math.isnan(number)):
        return args[0]
    raise OffloadedModelError(
        f"gradients cannot be scaled (got {'one factor each' if number is None else number}) when update='in_backward' "
        "has updated layers with them already; use update='deferred' for clipping, or only ask for the norm: "
        "max_grad_norm=0 in transformers, clip_grad_norm_(parameters, math.inf)"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, ConsumedNorm):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _as_norm(value: Any, others: set[int]) -> Any:
    """Returns what was computed from a norm as one; the ``others`` that were given stay what they are."""
    if type(value) is Tensor and value.is_floating_point() and id(value) not in others:
        return value.as_subclass(ConsumedNorm)
    if type(value) in (list, tuple):
        return type(value)(_as_norm(item, others) for item in value)
    return value
