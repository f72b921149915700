"""Parts of an offloaded model that are computed at different times: stages, and what is known of their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from stronghold.schedule import Computation

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine


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
            block = engine.blocks[layer]
            block.keep = True
            if block.compiled is not None:
                block.compiled.keep_activations()


def _layers_of(part: nn.Module, engine: Engine) -> list[int]:
    within = {id(module) for module in part.modules()}
    return [block.layer for block in engine.blocks if id(block.module) in within]
