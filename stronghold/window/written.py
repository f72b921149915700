"""What the user has written of a layer that a backward pass, when it failed, left in its slot."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit, data_of, digest, same_octets


class Written:
    """The values of a layer that is still bound, where the user has written them in its slot or on the host.

    By the parameters the user writes into the slot, and into the host's memory by a tensor over it that was held since
    before (of a state dictionary, ``p.data``, an array of numpy). Which of both was written the ``digests`` tell: those
    of the host's weights when the layer came into its slot, of each that the user held then. Writes by ``p.data`` count
    no version.
    """

    def __init__(self, unit: Unit, digests: Mapping[int, Tensor]) -> None:
        self._unit = unit
        self._values: dict[int, Tensor] = {}
        """What was written into the slot, by index."""
        self._on_both = False
        unit.wait_updated()
        with torch._C.DisableTorchFunctionSubclass():
            values = [data_of(parameter).cpu() for parameter in unit.parameters]
        for index, (value, weight) in enumerate(zip(values, unit.weight, strict=True)):
            if same_octets(value, weight):
                continue
            before = digests.get(index)
            on_host = unit.is_aliased_at(index) if before is None else not torch.equal(digest(weight), before)
            if not on_host:
                self._values[index] = value.clone()  # on the CPU it is in the slot
            elif before is None or not torch.equal(digest(value), before):
                self._on_both = True

    def take_over(self) -> None:
        """Writes into the parameters, which are on the host again, what was written in the slot.

        Raises OffloadedModelError where a weight was written in both places, or where it cannot be told in which.
        """
        with torch.no_grad():
            for index, value in self._values.items():
                self._unit.parameters[index].copy_(value)
        if self._on_both:
            raise OffloadedModelError(
                "behind a backward pass that failed a parameter is written either by itself or through a tensor over "
                "its memory that was held before, such as a state dictionary or p.data, for its layer was still on the "
                f"device (got both in {self._unit.name}, or nothing tells which; it has what the host's memory has); "
                "write all values again"
            )
