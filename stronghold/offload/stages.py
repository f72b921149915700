"""An offloaded model that is a part of a larger one, whose other layers other processes have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from stronghold.offload.engine import Engine
from stronghold.offload.offload import engine_of_offloaded
from stronghold.schedule import Computation


def share_norm(
    model: nn.Module, sum_over_all: Callable[[float], float], counted_elsewhere: Iterable[nn.Parameter]
) -> None:
    """Makes the global norm of the gradients that of all processes, which clip and skip steps together.

    ``sum_over_all`` adds a number up over them; ``counted_elsewhere`` are the parameters of ``model`` whose gradient
    another one counts. Raises OffloadedModelError for a model that is not offloaded.
    """
    engine = engine_of_offloaded(model)
    engine.sum_over_all = sum_over_all
    engine.counted_elsewhere = frozenset(map(id, counted_elsewhere))


def follow(model: nn.Module, passes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Foresees in each step the ``passes``: (part of the model, backward) in the order in which they are computed.

    It is a forecast for what to fetch next and changes no result. Raises OffloadedModelError for a model that is not
    offloaded.
    """
    engine = engine_of_offloaded(model)
    layers: dict[int, list[int]] = {}
    order = []
    for part, backward in passes:
        row = layers.setdefault(id(part), _layers_of(part, engine))
        order += [Computation(layer, backward) for layer in (reversed(row) if backward else row)]
    engine.window.follow(order)


def _layers_of(part: nn.Module, engine: Engine) -> list[int]:
    within = {id(module) for module in part.modules()}
    return [block.layer for block in engine.blocks if id(block.module) in within]
