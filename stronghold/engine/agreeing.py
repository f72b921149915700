"""What replicas must have alike when they take a step: gradients for the same parameters, and the settings."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from stronghold.optim import HostAdamW, settings_in_common
from stronghold.unit import Replicas, Unit, grad_meta_of, gradient_name


def agree_on_step(replicas: Replicas, optimizer: HostAdamW, given: Mapping[Unit, Mapping[int, Tensor]]) -> None:
    """Raises ParallelError where replicas are not ``given`` gradients at the same indices of the same units.

    And where they would update with other settings, parameters are in other groups, or gradients of layers that a loop
    has assigned itself are not the same: each replica updates its share with its own.
    """
    if replicas.world_size > 1:
        for unit in given:
            unit.handed_out.check(unit.name, gradients=True)
            unit.fetched.wait()  # others are to write what this one's device, which may be behind, has still to read
        number = optimizer.group_number
        done = [
            (unit.name, tuple((i, number(unit, i), _assigned(unit, gradient)) for i, gradient in gradients.items()))
            for unit, gradients in given.items()
        ]

        def named() -> dict[str, object]:
            return {
                gradient_name(unit, index): (number(unit, index), _assigned(unit, gradient))
                for unit, gradients in given.items()
                for index, gradient in gradients.items()
            }

        replicas.agree(done, settings=settings_in_common(optimizer), named=named)
        for unit in given:
            unit.handed_out.forget()


def _assigned(unit: Unit, gradient: Tensor) -> int | None:
    """Returns a checksum of a layer's gradient that is not one that its backward pass has published."""
    if unit.is_root or unit.resident or grad_meta_of(gradient) is not None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return zlib.crc32(gradient.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
