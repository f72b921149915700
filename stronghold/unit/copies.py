"""Copies between the host and the device that nobody waits for: the user's, and torch's own.

Where a whole model is on the device they are in the order of the computation. The host is in no such order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stronghold.device import Wait, Waits

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit

_COPYING = {"to", "copy_", "cuda", "_foreach_copy_", "_to_copy"}


class Copies:
    """Those that may be under way to or from a unit's memory on the host."""

    def __init__(self) -> None:
        self.waits: Waits | None = None
        self.expected = False
        """Whether the user has got tensors over the weights since the host has waited: what is copied is not seen."""

    @property
    def go_on_beside(self) -> bool:
        """Whether there is a device whose copies go on beside the host."""
        return (waits := self.waits) is not None and not waits.device.is_host

    def settle(self, *, held: bool) -> None:
        """Called before the engine reads or writes the weights, of which the user may have ``held`` some for long."""
        if self.expected or held:
            self.wait()

    def wait(self) -> None:
        """Waits until all is done that the calling thread has given the device."""
        self.expected = False
        if self.waits is not None:
            self.waits.behind(Wait.COPIES)


def wait_for_copies(units: Iterable[Unit]) -> None:
    """Waits so for all ``units`` whose weights are on the host."""
    on_host = (unit for unit in units if not (unit.resident or unit.has_device_copy))
    for copies in {id(unit.copies.waits): unit.copies for unit in on_host}.values():
        copies.wait()


def wait_for_factors(key: str, units: Iterable[Unit], args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Waits, before a fused optimizer's kernel updates weights on the host, for the numbers that torch copies for it.

    It copies them down without waiting: a learning rate, the loss' scale, whether a gradient was infinite.
    """
    if key.startswith("_fused_") and any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        wait_for_copies(units)


def blocking(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call by the name ``key``, with which it waits for what it copies."""
    if key not in _COPYING:
        return args, kwargs
    if kwargs.get("non_blocking"):
        kwargs = {**kwargs, "non_blocking": False}
    flags = [place for place, value in enumerate(args) if isinstance(value, bool)]
    if flags and args[flags[0]]:  # the first is non_blocking, wherever it stands
        args = (*args[: flags[0]], False, *args[flags[0] + 1 :])
    return args, kwargs
