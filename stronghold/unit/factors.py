"""Numbers of the device that an operation on weights of the host works with, such as a learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stronghold.device import Wait, Waits

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit


class Factors:
    """They are copied down by torch's fused optimizers, which do not wait: the operation would read what was there."""

    def __init__(self) -> None:
        self.waits: Waits | None = None

    def wait(self) -> None:
        """Waits until all that the calling thread has given the device is done."""
        if (waits := self.waits) is not None:
            event = waits.device.record_event()
            assert self.waits is not None
            self.waits.host(event, Wait.FACTORS)


def wait_for_factors(key: str, units: Iterable[Unit], args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Waits for those of a call by the name ``key`` on weights of ``units``, where it is one that has some."""
    if not key.startswith("_fused_") or not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return
    on_host = (unit for unit in units if not (unit.resident or unit.has_device_copy))
    for factors in {id(unit.factors.waits): unit.factors for unit in on_host}.values():
        factors.wait()
