"""An offloaded model that is a part of a larger one, whose other layers other processes have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import nn

from stronghold.schedule import Computation

if TYPE_CHECKING:
    from stronghold.offload.engine import Engine

T = TypeVar("T")


class Company(Protocol):
    """The processes that train one model together. All of them call the same methods in the same order."""

    rank: int
    world_size: int
    local_world_size: int
    """How many of them, with this one, are on this machine."""

    def sum(self, value: float) -> float:
        """Returns the sum of all processes' ``value``, the same bits in each; not a number if one is not finite."""

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the ``value`` of every process, in the order of their ranks."""

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Runs ``action`` in every process; where it raises in one, all raise, and the first of those has it to say."""


class Alone:
    """One process that has the whole model."""

    rank = 0
    world_size = 1
    local_world_size = 1

    def sum(self, value: float) -> float:
        return value

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def run_on_all(self, action: Callable[[], T]) -> T:
        return action()


def from_rank0(company: Company, action: Callable[[], T]) -> T:
    """Returns in every process what ``action`` returns in the first; where it raises, all raise."""
    return company.all_gather_object(company.run_on_all(action if company.rank == 0 else lambda: None))[0]  # type: ignore[return-value]


def follow(engine: Engine, passes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Foresees in each step the ``passes``: (part of the model, backward) in the order in which they are computed.

    It is a forecast for what to fetch next and changes no result.
    """
    layers: dict[int, list[int]] = {}
    order = []
    for part, backward in passes:
        row = layers.setdefault(id(part), _layers_of(part, engine))
        order += [Computation(layer, backward) for layer in (reversed(row) if backward else row)]
    engine.window.follow(order)


def keep_activations(engine: Engine, parts: Iterable[nn.Module]) -> None:
    """Has the layers in ``parts`` of the model keep what autograd saves, rather than run again in the backward pass."""
    for part in parts:
        for layer in _layers_of(part, engine):
            engine.blocks[layer].keep = True


def _layers_of(part: nn.Module, engine: Engine) -> list[int]:
    within = {id(module) for module in part.modules()}
    return [block.layer for block in engine.blocks if id(block.module) in within]
