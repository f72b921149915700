"""What a quantised weight consists of: cells, each a tensor at an attribute of an object, that move with its layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Cell(NamedTuple):
    """A tensor that a quantised weight consists of: what ``name`` of ``holder`` is, and its name in checkpoints."""

    own: str
    holder: Any
    name: str


class Packing(Protocol):
    """One way in which a library keeps quantised weights.

    They ``may_be_kept`` where what their backward pass saves is the weight in its slot, and not a copy of it.
    """

    may_be_kept: bool

    def has(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is a weight of this kind."""

    def moves_itself(self, parameter: Tensor) -> bool:
        """Whether the weight has memory of its own, which moves by its ``data``; else its cells are all there is."""

    def title(self, parameter: Tensor) -> str:
        """Returns what its values are, for people: "in four bits", say."""

    def cells(self, module: nn.Module, parameter: Any) -> Iterator[Cell]:
        """Yields what moves beside the weight itself."""

    def settle(self, module: nn.Module, parameter: Any, device: torch.device) -> None:
        """Moves what is the same for each weight of a type to the device, where it stays.

        Has the module save what its backward pass needs as autograd knows, if it does not.
        """

    def check(
        self, name: str, module: nn.Module, parameter: Any, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """Raises ValueError for a weight ``name`` of ``module`` that cannot move, or not be computed with there.

        The layer's other weights compute in ``dtype``, or None for what they are in.
        Has the module compute with the cells as they are.
        """

    def unpacked(self, parameter: Any) -> Tensor | None:
        """Returns what stands for the weight as it was before, on the meta device; None where nothing can pack it."""

    def pack(self, parameter: Any, value: Tensor) -> Iterator[Tensor]:
        """Yields what the weight and its cells are where it is to hold ``value``."""

    def copy(self, parameter: Any, own: Any, memo: dict[int, Any]) -> nn.Parameter:
        """Returns a copy of a weight that moves itself, whose class was ``own``, with copies of its cells."""


@dataclass(frozen=True)
class PackedPart:
    """Marks a parameter as a part of a quantised weight.

    ``title`` is what the values are in, and ``count`` of how many of the model's numbers it is the first part. With
    ``may_be_kept`` autograd may keep what it saves of a layer with it.
    """

    title: str
    may_be_kept: bool
    count: int


def part_of(parameter: Tensor) -> PackedPart | None:
    """Returns the mark of a parameter, or None where it is no part of a quantised weight."""
    found: PackedPart | None = parameter.__dict__.get("_part")
    return found


def cell_parameter(cell: Cell) -> nn.Parameter:
    """Returns the tensor in a cell, which becomes a parameter if it is none yet: it moves by its ``data`` then."""
    found = getattr(cell.holder, cell.name)
    if not isinstance(found, nn.Parameter):
        found = nn.Parameter(found, requires_grad=False)
        setattr(cell.holder, cell.name, found)
    return found


def follow(start: Any, path: tuple[str, ...]) -> Any:
    """Returns the attribute of an attribute of ... ``start``, or None where there is none."""
    for name in path:
        start = getattr(start, name, None)
    return start
