"""Who uses a tensor's memory: PyTorch counts the tensors over a storage, and a user's among them shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit

Turn = Callable[[], AbstractContextManager[None]]
"""Runs a block while no other thread computes."""


def is_shared(gradient: Tensor) -> bool:
    """Whether others use the memory of a gradient than itself and a detached twin."""
    return _count(gradient) > _ALONE + 1


class Lent:
    """A tensor of ours over a storage of which the user gets other tensors, and whether there are any.

    PyTorch counts the tensors over a storage and, depending on its version, not who holds the storage itself: of that
    Python has one object, whose users Python counts.
    """

    __slots__ = ("_alone", "_storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._storage = tensor, tensor.untyped_storage()
        self._alone = self._users()

    def is_over(self, other: Tensor) -> bool:
        """Whether another tensor is over the same storage."""
        return bool(other.untyped_storage()._cdata == self._storage._cdata)

    def has_others(self, *, but: int = 0) -> bool:
        """Whether the user has a tensor over the storage, ``but`` for so many, or the storage itself."""
        tensors, holders = self._users()
        return tensors > self._alone[0] + but or holders > self._alone[1]

    def _users(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


def has_company(gradient: Tensor) -> bool:
    """Whether the memory of a gradient, as autograd gave it, is used by another tensor as well."""
    return _count(gradient) > _ALONE


def is_aliased(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Whether the memory of ``tensor``, which ``parameter`` uses but while its layer is in a slot, is used by others.

    Another thread may ask while that changes: a parameter that was elsewhere before or behind counts as elsewhere.
    """
    memory = tensor.untyped_storage()._cdata
    with torch._C.DisableTorchFunctionSubclass():
        before = parameter.untyped_storage()._cdata == memory
        users = _count(tensor)
        return users > _ALONE + (before and parameter.untyped_storage()._cdata == memory)


class Users:
    """Counts the users of a unit's tensors, all at once, for the thread that computes."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._storages: list[int] = []
        """The addresses of their storages."""

    def aliased(self, tensors: list[Tensor], first: nn.Parameter) -> list[int]:
        """Returns of which ``tensors`` :func:`is_aliased` holds; ``first`` is the parameter of the first of them."""
        if self._tensors is not tensors:
            self._tensors, self._storages = tensors, [tensor.untyped_storage()._cdata for tensor in tensors]
        if not tensors:
            return []
        with torch._C.DisableTorchFunctionSubclass():  # they go into a slot together
            here = first.untyped_storage()._cdata == self._storages[0]
        count, users = torch._C._storage_Use_Count, _ALONE + here
        return [index for index, storage in enumerate(self._storages) if count(storage) > users]


def check_unmoved(unit: Unit) -> None:
    """Raises OffloadedModelError where a layer's weights are no longer in the memory from where they are fetched."""
    assert unit.buffer is not None
    begin = unit.buffer.flat.data_ptr()
    for weight, offset in zip(unit.weight, unit.layout.offsets, strict=True):
        if weight.data_ptr() - begin != offset and weight.numel():
            raise OffloadedModelError(
                f"an offloaded layer's weights stay in their memory (those of {unit.name} have been moved into memory "
                "that processes share, by p.share_memory_() or by a queue of torch.multiprocessing); build the model "
                "anew, and send copies: {n: w.clone() for n, w in model.state_dict().items()}"
            )


def _count(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _count(torch.empty(1, device="cpu"))
