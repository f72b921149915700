"""A layer that writes its own parameters while it computes: by ``.data``, too, which counts no version."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError
from stronghold.unit.compiler import opaque

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit

_DATA: Any = torch._C.TensorBase.data


def data_of(parameter: nn.Parameter) -> Tensor:
    """Returns ``parameter.data``, of which nothing is noted."""
    return cast(Tensor, _DATA.__get__(parameter))


def set_data(parameter: nn.Parameter, value: Tensor) -> None:
    """Sets it."""
    _DATA.__set__(parameter, value)


class OwnWrites:
    """Copies of what a unit's layer gets of its own parameters by ``.data`` while it computes."""

    def __init__(self) -> None:
        self.in_forward = False
        """Whether the layer is in a forward pass."""
        self._read: dict[int, Tensor] = {}
        """By index."""

    def is_computing(self) -> bool:
        """Whether the layer is being computed: it is on the device behind a backward pass that has failed as well."""
        return self.in_forward or torch._C._current_graph_task_id() != -1

    def reads(self, index: int, values: Tensor) -> None:
        """Called before the layer gets the ``values`` of a parameter."""
        if index not in self._read:
            self._read[index] = values.clone()

    def any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns whether one of the layer's was written since this was last asked, and puts its values back."""
        if not self._read:  # most layers read none so
            return False
        read, self._read = self._read, {}
        now = {index: data_of(parameters[index]) for index in read}
        written = [index for index, before in read.items() if not _same(now[index], before)]
        for index in written:
            now[index].copy_(read[index])
        return bool(written)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (one, other)))  # with NaN


def own_write_error(name: str) -> OffloadedModelError:
    """Returns the error for a layer that has written a parameter of its unit ``name``."""
    return OffloadedModelError(
        f"{name} changed one of its own parameters in place during its computation; such a change would "
        "be lost, because the device holds a copy. Change parameters outside the layer's forward; an "
        "optimizer's step comes when backward() has returned, or within it by AdamW(update='in_backward')"
    )


def _get(parameter: nn.Parameter) -> Tensor:
    values = data_of(parameter)
    if (unit := _watched(parameter)) is not None:
        unit.own_writes.reads(parameter.__dict__["_index"], values)
    return values


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    if (unit := _watched(parameter)) is not None:
        raise own_write_error(unit.name)
    set_data(parameter, value)


def _watched(parameter: nn.Parameter) -> Unit | None:
    """Returns the unit whose layer is computing, but of a weight of a quantised class, which sets it to itself."""
    reference: weakref.ref[Unit] | None = parameter.__dict__.get("_unit_reference")
    unit = None if reference is None or parameter.__dict__.get("_own_class") is not None else reference()
    return unit if unit is not None and unit.own_writes.is_computing() else None


watched_data = property(opaque(_get), opaque(_set))
"""The ``data`` of a parameter whose layer is on the device."""
