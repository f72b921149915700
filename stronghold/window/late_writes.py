"""Writes into gradients that have been copied already, by hooks of the user's that have kept them."""

from __future__ import annotations

from sys import getrefcount
from typing import NamedTuple

from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit


class _Copied(NamedTuple):
    unit: Unit
    gradient: Tensor
    version: int

    @property
    def is_alone(self) -> bool:
        """Whether nobody else holds the gradient, but this."""
        return _holders(self) <= _ALONE


def _holders(pair: tuple) -> int:
    return getrefcount(pair[1])


_ALONE = _holders((None, object()))


class LateWrites:
    """Finds out whether what was copied of a backward pass is what the user's hooks have made of it.

    In plain PyTorch a hook may keep ``p.grad`` and write it when that of another parameter comes. What a hook keeps is
    held as well, so that a write shows that is its last use.
    """

    def __init__(self) -> None:
        self._copied: list[_Copied] = []

    def note(self, unit: Unit, gradient: Tensor) -> None:
        """Notes a gradient that goes by its copy from now on."""
        self._copied.append(_Copied(unit, gradient, gradient._version))

    def check(self) -> None:
        """Raises OffloadedModelError where one was written since; lets go of those that no hook keeps."""
        copied, self._copied = self._copied, []
        for one in copied:
            if one.gradient._version != one.version:
                raise OffloadedModelError(
                    f"a gradient of {one.unit.name} is taken when its own hooks have been called, and a write after "
                    "that would be lost (a hook has kept it, and changed it when the gradient of another parameter "
                    "came); change it in the hook of its own parameter, or change p.grad when backward() has returned"
                )
        self._copied = [one for one in copied if not one.is_alone]

    def end(self, *, failed: bool) -> None:
        """Forgets the backward pass, and checks for the last time unless it has ``failed``."""
        if not failed:
            self.check()
        self._copied = []
