"""What a layer puts into a mapping that it is given, for layers behind it: Gemma 3n's share keys and values so."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from stronghold.engine.copying import structural_copy

PassedOn = dict[int, dict[Any, Any]]
"""New items of mappings, by the argument's place."""


def output_and_items(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, PassedOn]:
    """Returns what a layer returns and what it passes on, and leaves its arguments as they are."""
    given = structural_copy((args, kwargs))
    with torch.no_grad():
        output = forward(*given[0], **given[1])
    both = zip(_in_order(args, kwargs), _in_order(*given), strict=True)
    new = {
        place: {key: behind[key] for key in behind if key not in before}
        for place, (before, behind) in enumerate(both)
        if isinstance(before, MutableMapping)
    }
    return output, new


def pass_on(items: PassedOn, args: tuple, kwargs: dict[str, Any]) -> None:
    """Puts ``items`` into the mappings among arguments like those of the call that they are of."""
    arguments = _in_order(args, kwargs)
    for place, its in items.items():
        arguments[place].update(its)


def _in_order(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *kwargs.values()]
