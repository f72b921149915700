"""How a tensor lies on the devices of a stage, and what brings it from one layout to another.

After Unger et al., "Unity" (OSDI 2022), and Liu et al., "Aceso" (EuroSys 2024), section 4.2: a tensor has so many whole
copies, and each copy is split along its dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Share(NamedTuple):
    """How the devices of a stage share one operator.

    ``degree`` devices split the operator (tensor parallelism), in the way that ``algorithm`` numbers, and ``replicas``
    such groups compute different samples (data parallelism).
    """

    degree: int
    replicas: int
    algorithm: int = 0

    @property
    def devices(self) -> int:
        return self.degree * self.replicas


@dataclass(frozen=True, eq=False)
class Sharing:
    """How ``devices`` share each operator of a whole model; it is equal to itself alone."""

    devices: int
    choices: tuple[Share, ...]


class TensorLayout(NamedTuple):
    """``copies`` of a tensor, each split into ``parts`` along its dimensions."""

    copies: int
    parts: tuple[int, int, int]


class Reshard(NamedTuple):
    """The collectives among ``devices`` that change a layout on the way forward, and its gradient's on the way back."""

    forward: str
    backward: str
    devices: int


SPLIT = "split"
"""A device keeps a part of what it has: nothing is sent."""


def reshard(given: TensorLayout | None, wanted: TensorLayout | None) -> Reshard | None:
    """Returns how ``given`` becomes ``wanted``, None where nothing has to be done or a layout is not known."""
    if given is None or wanted is None or given == wanted:
        return None
    if given.copies > wanted.copies:
        return Reshard(SPLIT, "all_gather", given.copies // wanted.copies)
    for had, has in zip(given.parts, wanted.parts, strict=True):
        if had > has:
            if given.copies < wanted.copies:
                return Reshard("all_gather", SPLIT, had // has)
            return Reshard("all_to_all", "all_to_all", had // has)
    return None
