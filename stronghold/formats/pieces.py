"""Tensors that are whole in a checkpoint and in pieces in the model, along the first dimension: split experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Group(Protocol):
    """Tensors, named ``sources`` on one side, that together become tensors of the other side."""

    @property
    def sources(self) -> list[str]: ...

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Pieces:
    """The pieces of one tensor: their names, and how long each is; the last may be shorter."""

    names: list[str]
    length: int


def pieces_of(model: nn.Module) -> dict[str, Pieces]:
    """Returns what of ``model`` is in pieces, by the name of the whole.

    A module tells by ``pieces()``, the names of its pieces by those of the wholes, and ``experts_per_part``.
    """
    found = {}
    for prefix, module in model.named_modules():
        if callable(pieces := getattr(module, "pieces", None)) and hasattr(module, "experts_per_part"):
            for name, names in pieces().items():
                found[f"{prefix}.{name}"] = Pieces([f"{prefix}.{one}" for one in names], module.experts_per_part)
    return found


def whole_names(names: Iterable[str], pieces: Mapping[str, Pieces]) -> list[str]:
    """Returns ``names`` with the whole's in the place of the first of its pieces."""
    first = {of.names[0]: whole for whole, of in pieces.items()}
    others = {name for of in pieces.values() for name in of.names[1:]}
    return [first.get(name, name) for name in names if name not in others]


@dataclass(frozen=True)
class Joined:
    """A group of which some sources are in pieces."""

    group: Group
    pieces: Mapping[str, Pieces]

    @property
    def sources(self) -> list[str]:
        """The pieces in the place of the whole."""
        return [name for source in self.group.sources for name in self._names(source)]

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns what ``tensors``, one for each source, become, by name."""
        given = iter(tensors)
        wholes = []
        for source in self.group.sources:
            parts = [next(given) for _ in self._names(source)]
            wholes.append(torch.cat(parts) if source in self.pieces else parts[0])
        return self.group.convert(wholes)

    def _names(self, source: str) -> list[str]:
        return self.pieces[source].names if source in self.pieces else [source]


@dataclass(frozen=True)
class Cut:
    """A group of whose results some are cut into pieces."""

    group: Group
    pieces: Mapping[str, Pieces]

    @property
    def sources(self) -> list[str]:
        """Those of the group."""
        return self.group.sources

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns what ``tensors``, one for each source, become, by name."""
        results: dict[str, Tensor] = {}
        for name, value in self.group.convert(tensors).items():
            of = self.pieces.get(name)
            values = [value] if of is None or not value.ndim else value.split(of.length)
            results.update(zip([name] if of is None else of.names, values, strict=False))
        return results


def joined(groups: Iterable[Group], pieces: Mapping[str, Pieces]) -> list[Group]:
    """Returns ``groups``, made for the wholes, for what is in pieces."""
    return [Joined(group, pieces) if pieces.keys() & set(group.sources) else group for group in groups]
