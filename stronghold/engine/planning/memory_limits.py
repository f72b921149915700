"""What a plan may take of the memories, beside what is taken already."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be taken, in bytes; ``process`` of the host's memory is taken already.

    Beside a store on disk all that is left stays in RAM, unless ``fills_ram`` is false: then it is ``in_ram``, or
    nothing, and units are placed for an optimizer of which only ``update`` and ``states`` are known, as far as they
    are. The activations of so many ``batches`` must fit, and of the device's memory ``held`` is what may be taken
    from step to step.
    """

    device: int | None
    host: int
    process: int
    fills_ram: bool = True
    in_ram: int | None = None
    update: str | None = None
    states: str | None = None
    batches: int = 1
    held: int | None = None
