"""Gradients that DistributedDataParallel is to average, which leave the device before it reads them."""

from __future__ import annotations

from collections.abc import Collection

from torch.nn.parallel import DistributedDataParallel

from stronghold.errors import OffloadedModelError
from stronghold.unit import Unit, unit_of


def check_not_averaged(layer: Unit, units: Collection[Unit]) -> None:
    """Raises OffloadedModelError in a forward pass of DDP's that would average gradients of ``layer`` or of the root.

    That is those of ``units`` that are in no layer. Each layer asks in each forward pass: no other one is looked at.

    DDP reads a gradient behind the engine, which has taken it: it would average nothing, and say nothing of it. A model
    that it averages no gradients of, such as a frozen teacher, may be offloaded.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)  # which torch.compile asks, too
    if active is None:
        return
    trained = {unit for unit in (layer, *(unit for unit in units if unit.is_root)) if unit.trainable}
    for name, parameter in active.module.named_parameters() if trained else ():
        if unit_of(parameter) in trained and parameter.requires_grad and name not in active.parameters_to_ignore:
            raise OffloadedModelError(
                "DistributedDataParallel averages gradients that stay on the device, and those of an offloaded model "
                f"leave it before (got the forward pass of a {type(active.module).__name__} under it, and {name} "
                "offloaded); train it without DistributedDataParallel, in several processes by stronghold.replicate "
                "and a loop of your own in each"
            )
