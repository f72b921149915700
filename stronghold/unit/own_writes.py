"""A layer that writes its own parameters while it computes: by ``.data``, too, which counts no version."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError
from stronghold.unit.attributes import same_octets

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit

_DATA: Any = torch._C.TensorBase.data


def data_of(parameter: nn.Parameter) -> Tensor:
    """Returns ``parameter.data``, without a note of it."""
    return cast(Tensor, _DATA.__get__(parameter))


def set_data(parameter: nn.Parameter, value: Tensor) -> None:
    """Has the parameter look at the memory of ``value``, as ``parameter.data = value`` does."""
    _DATA.__set__(parameter, value)


class OwnWrites:
    """Copies of what a layer gets of its own parameters by ``.data``, from when it is bound until it has computed."""

    def __init__(self) -> None:
        self._watches = self._in_forward = False
        self._read: dict[int, Tensor] = {}
        """By index, of the value that the parameter had."""
        self._replaced: dict[int, Tensor] = {}
        """By index, what a parameter looked at before the layer had it look at the same values in another dtype."""
        self.found = False
        """Whether the layer has written a parameter."""

    def begin(self, *, forward: bool) -> None:
        """Called when the layer is bound, for a forward pass or a backward pass."""
        self._watches, self._in_forward, self.found = True, forward, False

    @property
    def watches(self) -> bool:
        """Whether it is the layer that asks: it stays bound behind a backward pass that has failed, for the user."""
        return self._watches and (self._in_forward or torch._C._current_graph_task_id() != -1)

    def reads(self, index: int, values: Tensor) -> None:
        """Called before the layer gets the ``values`` of a parameter."""
        if index not in self._read:
            self._read[index] = values.clone()

    def replaces(self, index: int, values: Tensor, by: Tensor) -> bool:
        """Returns whether a parameter may look at ``by`` until the layer has computed: if it has the same ``values``.

        So bitsandbytes gives a bias the dtype that it computes in.
        """
        if by.shape != values.shape or not torch.equal(values.to(by.dtype), by):
            return False
        self._replaced.setdefault(index, values)
        return True

    def compare(self, parameters: Sequence[nn.Parameter], *, failed: bool = False) -> None:
        """Called when the layer has computed: puts back what it has written, and notes that it has.

        Where that has failed it does neither: it is the user who may have written since.
        """
        if not self._watches:  # at the end of a backward pass that is done before the layer's update
            return
        for index, before in self._replaced.items():
            set_data(parameters[index], before)
        # Of most layers there are none; on a GPU each waits for the device.
        for index, before in () if failed else self._read.items():
            if not same_octets(now := data_of(parameters[index]), before):
                self.found = True
                now.copy_(before)
        self.end()

    def end(self) -> None:
        """Called when the layer's parameters are no longer bound, too: what is left of an interrupted pass goes."""
        self._watches = self._in_forward = False
        self._read.clear()
        self._replaced.clear()


def own_write_error(name: str) -> OffloadedModelError:
    """Returns the error for a layer that has written a parameter of its unit ``name``."""
    return OffloadedModelError(
        f"{name} changed one of its own parameters in place during its computation; such a change would "
        "be lost, because the device holds a copy. Change parameters outside the layer's forward; an "
        "optimizer's step comes when backward() has returned, or within it by AdamW(update='in_backward')"
    )


def _get(parameter: nn.Parameter) -> Tensor:
    if torch.compiler.is_compiling():  # writes into that count a version
        return torch.detach(parameter)
    values = data_of(parameter)
    if (unit := _watched(parameter)) is not None:
        unit.own_writes.reads(parameter.__dict__["_index"], values)
    return values


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    unit = _watched(parameter)
    if unit is not None and not unit.own_writes.replaces(parameter.__dict__["_index"], data_of(parameter), value):
        raise own_write_error(unit.name)
    set_data(parameter, value)


def _watched(parameter: nn.Parameter) -> Unit | None:
    """Returns the unit whose layer is computing, but of a weight of a quantised class, which sets it to itself."""
    reference: weakref.ref[Unit] | None = parameter.__dict__.get("_unit_reference")
    unit = None if reference is None or parameter.__dict__.get("_own_class") is not None else reference()
    return unit if unit is not None and unit.own_writes.watches else None


watched_data = property(_get, _set)
"""The ``data`` of a parameter whose layer is on the device."""
